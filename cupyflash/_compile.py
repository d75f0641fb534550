# SPDX-License-Identifier: MIT
"""Build kernels with NVRTC, keep the cubins, and load them through CuPy.

:func:`build` needs NVRTC and no GPU, and is the same for tests without one and for launches;
:func:`load` needs CuPy and a GPU. A build is found again under the hash of all sources, options,
the architecture and the NVRTC version, so that NVRTC itself is loaded only on a miss.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cupyflash import _cache, devices
from cupyflash._arrays import import_cupy
from cupyflash._messages import INSTALL_GPU

# No fast math: a kernel names each approximation it makes. Functions without a __device__ are
# device functions, so that constexpr helpers read as plain C++. -lineinfo changes no code.
_OPTIONS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
_WHEEL = re.compile(r"(cuda_bindings|nvidia_cuda_nvrtc(_cu\d+)?)-.+\.(dist|egg)-info")
# What a kernel may take from the CUDA toolkit; a cubin depends on their text too.
_TOOLKIT_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")


@dataclass(frozen=True)
class Build:
    """A kernel built for one architecture, and what the compiler said about it."""

    kernel: str
    options: tuple[str, ...]
    architecture: str
    registers: int  # 32-bit registers of a thread
    spill_store_bytes: int  # of a thread, as the two below
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int  # of a block
    max_threads: int  # of a block, by the kernel's __launch_bounds__
    nvrtc: str  # version of the compiler, "13.0"
    seconds: float  # that it took, whenever that was
    log: str
    cubin: bytes = field(repr=False)
    path: Path | None  # where the cubin is kept; None if only here
    cached: bool  # found, not built by this call


def kernels_folder() -> Path:
    """Where the CUDA sources are: in the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    candidates = (package / "kernels", package.parent / "kernels")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        f"cupyflash: no kernels in {candidates[0]} or {candidates[1]}; the installation is "
        "incomplete, install cupyflash again"
    )


def kernel_sources() -> dict[str, bytes]:
    """All CUDA sources, by the name under which kernels include them."""
    root = kernels_folder()
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*.cu*"))
        if path.suffix in (".cu", ".cuh")
    }


def kernel_names() -> list[str]:
    """The kernels that there are, one ``.cu`` file each."""
    return sorted(path.stem for path in kernels_folder().glob("*.cu"))


def build(
    kernel: str,
    options: tuple[str, ...],
    architecture: str,
    sources: Mapping[str, bytes] | None = None,
) -> Build:
    """Build a kernel, or find the build of an earlier call or process.

    Parameters
    ----------
    kernel : str
        ``<kernel>.cu`` among the sources, with one ``extern "C"`` entry of that name.
    options : tuple of str
        The ``-D`` macros that make the specialisation.
    architecture : str
        What to build for: ``"sm_80"``, ``"sm_90a"``, ...
    sources : mapping of str to bytes, optional
        Sources by their name in ``#include "..."``. Default: all of ``kernels/``.

    Returns
    -------
    Build

    Raises
    ------
    ValueError
        If there is no such kernel.
    ImportError
        If NVRTC or its Python bindings are needed and missing.
    RuntimeError
        If the kernel does not compile; the message holds the compiler's log.

    Examples
    --------
    >>> source = b'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
    >>> build("twice", (), "sm_80", {"twice.cu": source}).spill_store_bytes
    0
    """
    if sources is None:
        sources = kernel_sources()
    if f"{kernel}.cu" not in sources:
        known = ", ".join(name[:-3] for name in sources if name.endswith(".cu"))
        raise ValueError(f"build: no kernel {kernel!r}; there are: {known or 'none'}")
    key = _key(kernel, options, architecture, sources)
    with _memory_lock:
        if key in _memory:
            return _memory[key]
    identity = {"kernel": kernel, "options": tuple(options), "architecture": architecture}
    if (found := _cache.find(key)) is not None:
        report, cubin, path = found
        with contextlib.suppress(TypeError):  # a report of other fields is no report
            return Build(**identity, **report, cubin=cubin, path=path, cached=True)
    report, cubin = _compile(kernel, options, architecture, sources)
    path = _cache.store(key, report, cubin)
    built = Build(**identity, **report, cubin=cubin, path=path, cached=False)
    if path is None:
        with _memory_lock:
            _memory[key] = replace(built, cached=True)
    return built


def load(kernel: str, options: tuple[str, ...], device_id: int, smem_bytes: int) -> Any:
    """Return the CuPy function of a kernel on a device, building it if need be.

    Parameters
    ----------
    kernel, options
        As for :func:`build`.
    device_id : int
        CuPy's number of the device; it need not be the current one, and the current one stays.
    smem_bytes : int
        Dynamic shared memory that a launch of the function may ask for.

    Returns
    -------
    cupy.RawKernel
        Loaded; ``function.kernel.ptr`` is the driver's handle while the device is current.

    Raises
    ------
    ImportError
        If CuPy, NVRTC or its Python bindings are missing.
    RuntimeError
        If CuPy was built for ROCm, the kernel does not compile, or the driver refuses it.
    """
    key = (device_id, kernel, options)
    loaded = _loaded.get(key)
    if loaded is not None and loaded.smem_bytes >= smem_bytes:
        return loaded.function
    with _load_lock:
        loaded = _loaded.get(key)
        if loaded is None:
            architecture = devices.current_device(device_id).architecture
            built = build(kernel, options, architecture)
            loaded = _Loaded(load_build(built, device_id), _UNASKED_SMEM - built.static_smem_bytes)
        if smem_bytes > loaded.smem_bytes:
            with import_cupy().cuda.Device(device_id):
                loaded.function.max_dynamic_shared_size_bytes = smem_bytes
            loaded.smem_bytes = smem_bytes
        _loaded[key] = loaded
    return loaded.function


def load_build(built: Build, device_id: int) -> Any:
    """Load one build on a device and return its CuPy function; see :func:`load`."""
    cupy = import_cupy()
    with _cubin_file(built) as path, cupy.cuda.Device(device_id):
        try:
            return cupy.RawModule(path=str(path)).get_function(built.kernel)
        except cupy.cuda.driver.CUDADriverError as error:
            raise RuntimeError(
                f"cupyflash: device {device_id} refuses kernel {built.kernel!r} built for "
                f"{built.architecture} with NVRTC {built.nvrtc}: {error}. A driver takes kernels "
                "of its own CUDA major version and older ones: update it, or install the extra "
                "that suits it"
            ) from error


def clear_cache() -> None:
    """Forget all built kernels, in this process and in the cache folder."""
    with _load_lock, _memory_lock:
        _loaded.clear()
        _memory.clear()
    _cache.clear()


def nvrtc_version() -> tuple[int, int]:
    """Load NVRTC and ask for its version.

    Raises
    ------
    ImportError
        If NVRTC or its Python bindings are missing.
    """
    nvrtc = _nvrtc()
    return _call(nvrtc, nvrtc.nvrtcVersion)


_UNASKED_SMEM = 48 * 1024  # static and dynamic, that every function may use


@dataclass
class _Loaded:
    function: Any
    smem_bytes: int  # dynamic; what it may ask for at a launch


_loaded: dict[tuple[int, str, tuple[str, ...]], _Loaded] = {}
_load_lock = threading.Lock()
# Builds that the cache folder did not take, by key.
_memory: dict[str, Build] = {}
_memory_lock = threading.Lock()


def _key(
    kernel: str, options: tuple[str, ...], architecture: str, sources: Mapping[str, bytes]
) -> str:
    """Hash everything that a cubin and its report depend on."""
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in sources.items()}
    parts = [kernel, options, architecture, _OPTIONS, _nvrtc_identity(), _toolkit()[1], digests]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _nvrtc_identity() -> str:
    """Tell NVRTC's version without loading it.

    NVRTC comes from a wheel where one is installed; then the versions of the wheels say it. Else
    the file that the dynamic linker or a CUDA installation offers says it, and where none is in
    sight, loading NVRTC does. Too much said costs a build, too little a stale cubin.
    """
    wheels = _installed_wheels()
    if any("nvrtc" in wheel for wheel in wheels):
        return ", ".join(wheels)
    libraries = []
    for directory in _library_directories():
        for library in sorted(directory.glob("libnvrtc.so.*")):
            with contextlib.suppress(OSError):
                libraries.append(f"{library.resolve()} {library.stat().st_mtime_ns}")
    if libraries:
        return ", ".join(wheels + libraries)
    return ", ".join([*wheels, "NVRTC {}.{}".format(*nvrtc_version())])


def _installed_wheels() -> list[str]:
    """Names and versions of the wheels that decide which NVRTC is loaded.

    By the names of their metadata folders: importing importlib.metadata takes longer than all else
    that finds a cached kernel.
    """
    found = set()
    for entry in sys.path:
        with contextlib.suppress(OSError):
            found.update(filter(_WHEEL.fullmatch, os.listdir(entry or ".")))
    return sorted(found)


def _cuda_roots() -> Iterator[Path]:
    for variable in ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME"):
        if value := os.environ.get(variable):
            yield Path(value)
    yield Path("/usr/local/cuda")


def _library_directories() -> Iterator[Path]:
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if entry:
            yield Path(entry)
    for root in _cuda_roots():
        yield from (root / "lib64", root / "lib")


@functools.cache
def _toolkit() -> tuple[Path | None, str]:
    """Find the folder of CUDA's own headers, and hash those that a kernel may include."""
    directories = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for wheel in ("cu13", "cuda_runtime"):  # of CUDA 13, of CUDA 12
            directories.append(Path(root) / wheel / "include")
    for root in _cuda_roots():
        directories += [root / "include", *root.glob("targets/*/include")]
    for directory in directories:
        if (directory / _TOOLKIT_HEADERS[0]).is_file():
            digest = hashlib.sha256()
            for header in _TOOLKIT_HEADERS:
                digest.update((directory / header).read_bytes())
            return directory, digest.hexdigest()
    return None, "none"


def _nvrtc() -> Any:
    """Import the bindings, which load NVRTC itself at the first call."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError(
            f"cupyflash: cuda-bindings is missing, and a kernel has to be built: {INSTALL_GPU}"
        ) from error
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's own errors have no common base
        raise ImportError(
            f"cupyflash: NVRTC can't be loaded, and a kernel has to be built: {INSTALL_GPU}"
        ) from error
    return nvrtc


def _call(nvrtc: Any, function: Any, *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{function.__name__} answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _compile(
    kernel: str, options: tuple[str, ...], architecture: str, sources: Mapping[str, bytes]
) -> tuple[dict[str, Any], bytes]:
    nvrtc = _nvrtc()
    version = "{}.{}".format(*_call(nvrtc, nvrtc.nvrtcVersion))
    toolkit, _ = _toolkit()
    all_options = [f"-arch={architecture}", *_OPTIONS, *options]
    if nvrtc_version() >= (12, 9):
        # Since then NVRTC keeps a cache of its own where there is a driver, and what comes out of
        # it comes without the resource report.
        all_options.append("--no-cache")
    if toolkit is not None:
        all_options.append(f"-I{toolkit}")
    # Headers go in as text: what is built is what was hashed, whatever happens to the files.
    headers = {name: text for name, text in sources.items() if name != f"{kernel}.cu"}
    program = _call(
        nvrtc,
        nvrtc.nvrtcCreateProgram,
        sources[f"{kernel}.cu"],
        f"{kernel}.cu".encode(),
        len(headers),
        list(headers.values()),
        [name.encode() for name in headers],
    )
    try:
        start = time.perf_counter()
        try:
            encoded = [option.encode() for option in all_options]
            _call(nvrtc, nvrtc.nvrtcCompileProgram, program, len(encoded), encoded)
        except RuntimeError as error:
            log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            message = _failure(kernel, options, architecture, version, log)
            raise RuntimeError(message) from error
        seconds = time.perf_counter() - start
        log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        ptx = _text(nvrtc, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        cubin = bytearray(_call(nvrtc, nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc, nvrtc.nvrtcGetCUBIN, program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    bounds = re.search(r"\.maxntid (\d+)", ptx)
    report = {
        "max_threads": int(bounds[1]) if bounds else 1024,
        "nvrtc": version,
        "seconds": round(seconds, 3),
        "log": log,
    }
    return resources(kernel, log) | report, bytes(cubin)


def _text(nvrtc: Any, size: Any, read: Any, program: Any) -> str:
    buffer = bytearray(_call(nvrtc, size, program))
    _call(nvrtc, read, program, buffer)
    return buffer.rstrip(b"\0").decode(errors="replace").strip()


def _failure(
    kernel: str, options: tuple[str, ...], architecture: str, version: str, log: str
) -> str:
    what = (
        f"cupyflash: kernel {kernel!r} with options {' '.join(options) or 'none'} does not build "
        f"for {architecture} with NVRTC {version}"
    )
    if missing := re.search(r"open source file \"(cuda_[^\"]+)\"", log):
        # The header is not part of NVRTC; the rest of the log would only hide that.
        return (
            f"{what}: {missing[1]} is missing. It comes with the CUDA runtime: {INSTALL_GPU}, or "
            "set CUDA_PATH to a CUDA toolkit"
        )
    if "--gpu-architecture" in log:
        return (
            f"{what}, which does not know the architecture: a GPU older than sm_75 needs the extra "
            f"cuda12, a newer one a newer NVRTC\n{log}"
        )
    return f"{what}:\n{log}"


def resources(kernel: str, log: str) -> dict[str, int]:
    """Read what a kernel needs out of the compiler's log (``--ptxas-options=-v``).

    Parameters
    ----------
    kernel : str
        The entry whose numbers are wanted; device functions that were not inlined have their own.
    log : str
        The whole log of one compilation.

    Returns
    -------
    dict
        ``registers``, ``spill_store_bytes``, ``spill_load_bytes``, ``stack_bytes``,
        ``static_smem_bytes``, as in :class:`Build`.

    Raises
    ------
    RuntimeError
        If the log does not say; NVRTC has then changed how it reports.

    Examples
    --------
    >>> log = '''ptxas info    : Compiling entry function 'k' for 'sm_80'
    ... ptxas info    : Function properties for k
    ...     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
    ... ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem'''
    >>> resources("k", log)["stack_bytes"], resources("k", log)["static_smem_bytes"]
    (8, 1024)
    """
    _, _, entry = log.partition(f"Compiling entry function '{kernel}'")
    frame = re.search(
        rf"Function properties for {re.escape(kernel)}\s.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        entry,
        re.DOTALL,
    )
    used = re.search(r"Used (\d+) registers(.*)", entry)
    if frame is None or used is None:
        raise RuntimeError(
            f"cupyflash: the compiler's log has no resource report for entry {kernel!r}; the "
            f'kernel needs an extern "C" __global__ function of that name. The log:\n{log}'
        )
    smem = re.search(r"(\d+) bytes smem", used[2])
    return {
        "registers": int(used[1]),
        "spill_store_bytes": int(frame[2]),
        "spill_load_bytes": int(frame[3]),
        "stack_bytes": int(frame[1]),
        "static_smem_bytes": int(smem[1]) if smem else 0,
    }


@contextlib.contextmanager
def _cubin_file(built: Build) -> Iterator[Path]:
    """A file that holds the cubin: the cached one, or a new one where there is none (any more).

    CuPy remembers modules by path, so a path must never come back with other content: cached files
    are named by their checksum, temporary ones anew each time.
    """
    if built.path is not None and built.path.exists():
        yield built.path
        return
    with tempfile.TemporaryDirectory(prefix="cupyflash-") as directory:
        path = Path(directory) / f"{built.kernel}.cubin"
        path.write_bytes(built.cubin)
        yield path
