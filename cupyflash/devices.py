# SPDX-License-Identifier: MIT
"""What a GPU has to offer: multiprocessors, shared memory, caches, bandwidth.

A plan needs these numbers and no GPU: they come from a table of named devices, or are read off a
device that is there. Limits per compute capability are those of the "Compute Capabilities"
appendix of the CUDA C++ Programming Guide; the rest is from NVIDIA's data sheets and white papers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Device:
    """A GPU as the planner sees it; sizes in bytes, bandwidth in bytes per second.

    Parameters
    ----------
    name : str
        Of the product.
    compute_capability : tuple of 2 int
        Major and minor.
    multiprocessors : int
        Of the product, as ``l2_bytes`` and ``memory_bandwidth`` are; the other limits are those of
        the compute capability.
    smem_block_bytes : int
        Shared memory that one thread block may opt in to: the M of the paper, once it is divided by
        the element size.
    smem_multiprocessor_bytes : int
        Shared memory of all resident blocks.
    l2_bytes : int
        The L2 cache, which all multiprocessors share.
    memory_bandwidth : float
        Of HBM, or whatever memory the product has, at its peak.
    registers_per_multiprocessor : int
        Of 32 bits.
    threads_per_multiprocessor, blocks_per_multiprocessor : int
        Most that may be resident, whatever else they take.

    Examples
    --------
    >>> device = named_device("A100")
    >>> device.architecture, device.multiprocessors, device.smem_block_bytes
    ('sm_80', 108, 166912)
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    smem_block_bytes: int
    smem_multiprocessor_bytes: int
    l2_bytes: int
    memory_bandwidth: float
    registers_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int

    @property
    def architecture(self) -> str:
        """What kernels are built for: ``"sm_80"``; ``"sm_90a"`` on Hopper, for its own features."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if self.compute_capability == (9, 0) else "")

    def resident_blocks(self, threads: int, registers: int, smem_bytes: int) -> int:
        """How many such thread blocks fit on one multiprocessor at a time.

        Parameters
        ----------
        threads : int
            Threads of a block.
        registers : int
            32-bit registers of a thread, as the compiler reports them.
        smem_bytes : int
            Static and dynamic shared memory of a block.

        Returns
        -------
        int
            0 if not even one fits.

        Examples
        --------
        >>> named_device("H200").resident_blocks(threads=256, registers=128, smem_bytes=100_000)
        2
        """
        warps = -(-threads // 32)
        # A warp takes its registers in units of 256, and each of the four schedulers has its own
        # quarter of the file; since 8.0 the system keeps 1 KiB of shared memory for each block.
        registers_per_warp = -(-registers * 32 // 256) * 256
        warps_by_registers = 4 * (self.registers_per_multiprocessor // 4 // registers_per_warp)
        reserved = _KIB if self.compute_capability >= (8, 0) else 0
        smem_taken = -(-smem_bytes // 128) * 128 + reserved
        if smem_bytes > self.smem_block_bytes:
            return 0
        return min(
            self.blocks_per_multiprocessor,
            self.threads_per_multiprocessor // (warps * 32),
            warps_by_registers // warps,
            self.smem_multiprocessor_bytes // max(smem_taken, 1),
        )


# compute capability -> KiB of shared memory per block (opt-in) and per multiprocessor,
# threads and blocks per multiprocessor. All have 65,536 registers.
_LIMITS = {
    (7, 0): (96, 96, 2048, 32),
    (7, 5): (64, 64, 1024, 16),
    (8, 0): (163, 164, 2048, 32),
    (8, 6): (99, 100, 1536, 16),
    (8, 9): (99, 100, 1536, 24),
    (9, 0): (227, 228, 2048, 32),
    (10, 0): (227, 228, 2048, 32),
    (12, 0): (99, 100, 1536, 24),
}

# name, compute capability, multiprocessors, L2 in MiB, memory bandwidth in GB/s.
_PRODUCTS = (
    ("V100", (7, 0), 80, 6, 900),
    ("T4", (7, 5), 40, 4, 320),
    ("RTX 2080 Ti", (7, 5), 68, 5.5, 616),
    ("A100", (8, 0), 108, 40, 2039),
    ("A30", (8, 0), 56, 24, 933),
    ("A10", (8, 6), 72, 6, 600),
    ("RTX 3090", (8, 6), 82, 6, 936),
    ("L4", (8, 9), 58, 48, 300),
    ("L40S", (8, 9), 142, 96, 864),
    ("RTX 4090", (8, 9), 128, 72, 1008),
    ("H100", (9, 0), 132, 50, 3350),
    ("H200", (9, 0), 132, 60, 4800),
    ("GH200", (9, 0), 132, 60, 4900),
    ("B200", (10, 0), 148, 126, 8000),
    ("RTX 5090", (12, 0), 170, 96, 1792),
)


def _table() -> dict[str, Device]:
    devices = {}
    for name, capability, multiprocessors, l2_mib, gigabytes_per_second in _PRODUCTS:
        smem_block, smem_multiprocessor, threads, blocks = _LIMITS[capability]
        devices[name] = Device(
            name=name,
            compute_capability=capability,
            multiprocessors=multiprocessors,
            smem_block_bytes=smem_block * _KIB,
            smem_multiprocessor_bytes=smem_multiprocessor * _KIB,
            l2_bytes=int(l2_mib * _MIB),
            memory_bandwidth=gigabytes_per_second * 1e9,
            registers_per_multiprocessor=65_536,
            threads_per_multiprocessor=threads,
            blocks_per_multiprocessor=blocks,
        )
    return devices


DEVICES = _table()


def architecture_device(architecture: str) -> Device:
    """The limits of an architecture, as a device of the table that has them.

    Parameters
    ----------
    architecture : str
        ``"sm_80"``, ``"sm_90a"``, ...

    Returns
    -------
    Device

    Raises
    ------
    ValueError
        If no device of the table has it.

    Examples
    --------
    >>> architecture_device("sm_75").smem_block_bytes // 1024
    64
    """
    for device in DEVICES.values():
        if device.architecture == architecture:
            return device
    known = ", ".join(dict.fromkeys(device.architecture for device in DEVICES.values()))
    raise ValueError(f"architecture_device: no device has {architecture!r}; known are {known}")


def named_device(name: str) -> Device:
    """Look up a device by its product name, in upper or lower case, with or without spaces.

    Parameters
    ----------
    name : str
        ``"H200"``, ``"RTX 4090"``, ``"rtx4090"``, ...

    Returns
    -------
    Device

    Raises
    ------
    TypeError
        If ``name`` is not a string.
    ValueError
        If no such device is in the table.

    Examples
    --------
    >>> named_device("rtx4090").compute_capability
    (8, 9)
    """
    if not isinstance(name, str):
        raise TypeError(f"named_device: name is {name!r}; expected a string such as 'H200'")
    wanted = _plain(name)
    for known, device in DEVICES.items():
        if _plain(known) == wanted:
            return device
    raise ValueError(f"named_device: no device {name!r}; known are {', '.join(DEVICES)}")


def _plain(name: str) -> str:
    words = name.casefold().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))


# enum cudaDeviceAttr; CuPy has names for a few of them only.
_ATTRIBUTES = {
    "MultiProcessorCount": 16,
    "MemoryClockRate": 36,
    "GlobalMemoryBusWidth": 37,
    "L2CacheSize": 38,
    "MaxThreadsPerMultiProcessor": 39,
    "ComputeCapabilityMajor": 75,
    "ComputeCapabilityMinor": 76,
    "MaxSharedMemoryPerMultiprocessor": 81,
    "MaxRegistersPerMultiprocessor": 82,
    "MaxSharedMemoryPerBlockOptin": 97,
    "MaxBlocksPerMultiprocessor": 106,
}


@functools.cache
def current_device(device_id: int) -> Device:
    """Read a device that is there off CuPy.

    Parameters
    ----------
    device_id : int
        CuPy's number of the device, ``array.device.id``.

    Returns
    -------
    Device
        The same object each time.

    Raises
    ------
    ImportError
        If CuPy is missing.
    OSError
        If CuPy can't create its folder in the home directory.
    RuntimeError
        If CuPy was built for ROCm.

    Examples
    --------
    >>> current_device(0).architecture  # doctest: +SKIP
    'sm_90a'
    """
    from cupyflash._arrays import import_cupy
    from cupyflash._gpu import ROCM

    runtime = import_cupy().cuda.runtime
    if runtime.is_hip:
        raise RuntimeError(f"cupyflash: {ROCM}")

    def attribute(name: str) -> int:
        return int(runtime.deviceGetAttribute(_ATTRIBUTES[name], device_id))

    # Double data rate: two transfers a clock, given in kHz; the bus width is in bits.
    transfers_per_second = 2e3 * attribute("MemoryClockRate")
    return Device(
        name=runtime.getDeviceProperties(device_id)["name"].decode(),
        compute_capability=(
            attribute("ComputeCapabilityMajor"),
            attribute("ComputeCapabilityMinor"),
        ),
        multiprocessors=attribute("MultiProcessorCount"),
        smem_block_bytes=attribute("MaxSharedMemoryPerBlockOptin"),
        smem_multiprocessor_bytes=attribute("MaxSharedMemoryPerMultiprocessor"),
        l2_bytes=attribute("L2CacheSize"),
        memory_bandwidth=transfers_per_second * attribute("GlobalMemoryBusWidth") / 8,
        registers_per_multiprocessor=attribute("MaxRegistersPerMultiprocessor"),
        threads_per_multiprocessor=attribute("MaxThreadsPerMultiProcessor"),
        blocks_per_multiprocessor=attribute("MaxBlocksPerMultiprocessor"),
    )
