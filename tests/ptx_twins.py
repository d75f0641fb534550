# SPDX-License-Identifier: MIT
"""Probes of the wrappers in ``kernels/ptx/``: how one runs, and how its results are compared.

Each probe of ``tests/ptx_probes/`` is one text, built for a GPU by NVRTC and for the CPU by g++
with the twins of ``tests/hostcuda/ptx/``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostcuda
import numpy as np
from hostcuda.modules import source_of

from cupyflash import _compile, _tensormap, devices
from cupyflash._params import Pointer

PROBES = Path(__file__).resolve().parent / "ptx_probes"
_MAP_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Output:
    """What one array must hold: ``expected``, to the bit or within ``bound`` of it.

    ``bound`` holds between two results of the instruction; ``expected`` is one of them, in float64
    where there is a bound. ``unit`` is the bound in words. ``computed`` is how many of the numbers
    the probe makes; the others stay as they were.
    """

    name: str
    array: np.ndarray
    expected: np.ndarray
    bound: np.ndarray | None = None
    unit: str = ""
    computed: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers the probe makes."""
        return self.array.size if self.computed is None else self.computed


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch of a probe. Arguments are arrays and integers, in the order of its ``Params``."""

    probe: str
    arguments: tuple[Any, ...]
    outputs: tuple[Output, ...]
    block: int
    grid: tuple[int, int] = (1, 1)
    smem_bytes: int = 0
    options: tuple[str, ...] = ()
    tensor_map: _tensormap.TensorMap | None = None
    capability: tuple[int, int] = (8, 0)

    def refusal(self, has: tuple[int, int]) -> str | None:
        """Why it can't run with the compute capability ``has``; None if it can."""
        hopper_only = self.probe in ("setmaxnreg", "wgmma")  # built for sm_90a
        if has < self.capability or (hopper_only and has != self.capability):
            needs = "{}.{}".format(*self.capability)
            return f"needs compute capability {needs}, the device has {has[0]}.{has[1]}"
        return None

    def record(self) -> SimpleNamespace:
        """The launch record."""
        front = b"" if self.tensor_map is None else bytes(_tensormap.BYTES)
        numbers = [0 if isinstance(x, np.ndarray) else x for x in self.arguments]
        params = front + struct.pack(f"<{len(numbers)}q", *numbers)
        if front:
            params = params.ljust(-(-len(params) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT, b"\0")
        return SimpleNamespace(
            kernel="probe",
            options=self.options,
            grid=(*self.grid, 1),
            block=(self.block, 1, 1),
            smem_bytes=self.smem_bytes,
            params=params,
            pointers=tuple(
                Pointer(len(front) + 8 * n, f"argument {n}", x)
                for n, x in enumerate(self.arguments)
                if isinstance(x, np.ndarray)
            ),
            tensor_maps=() if self.tensor_map is None else (self.tensor_map,),
        )

    @property
    def text(self) -> str:
        """The probe's source."""
        return (PROBES / f"{self.probe}.cu").read_text()

    def build(self, architecture: str) -> _compile.Build:
        """The probe built for a GPU."""
        sources = _compile.kernel_sources() | {"probe.cu": self.text.encode()}
        return _compile.build("probe", self.options, architecture, sources)

    def clear(self) -> None:
        """Makes the outputs what no probe leaves."""
        for output in self.outputs:
            output.array.reshape(-1).view(np.uint8)[...] = 0xAA

    def run_on_host(self, schedules: bool = False) -> list[np.ndarray]:
        """The outputs by the twins."""
        self.clear()
        run = hostcuda.run_schedules if schedules else hostcuda.run
        run(self.record(), source=self.text)
        return [output.array.copy() for output in self.outputs]

    def run_on_gpu(self) -> list[np.ndarray]:
        """The outputs by the instructions themselves."""
        cupy = sys.modules["cupy"]
        self.clear()
        record = self.record()
        function = _compile.load_build(self.build(devices.current_device(0).architecture), 0)
        if record.smem_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = record.smem_bytes
        params = bytearray(record.params)
        pointers = (*record.pointers, *(m.pointer for m in record.tensor_maps))
        there = {id(p.array): cupy.asarray(p.array) for p in pointers}
        for pointer in record.pointers:
            address = there[id(pointer.array)].data.ptr
            params[pointer.offset : pointer.offset + 8] = address.to_bytes(8, "little")
        for tensor_map in record.tensor_maps:
            address = there[id(tensor_map.pointer.array)].data.ptr
            encoded = _tensormap.encode(tensor_map, address)
            params[: _tensormap.BYTES] = ctypes.string_at(int(encoded.getPtr()), _tensormap.BYTES)
        argument = np.frombuffer(params, dtype=f"V{len(params)}")
        function(record.grid, record.block, (argument,), shared_mem=record.smem_bytes)
        return [cupy.asnumpy(there[id(output.array)]) for output in self.outputs]

    def twin_results(self) -> list[np.ndarray]:
        """The outputs by the twins; kept ones where kernels can't be compiled for the CPU.

        ``CUPYFLASH_PTX_TWINS`` names a folder: results are kept there, by the hash of the texts.

        Raises
        ------
        FileNotFoundError
            If there is neither a compiler nor a kept result.
        """
        folder = os.environ.get("CUPYFLASH_PTX_TWINS")
        files = source_of(self.record(), source=self.text).files
        written = {id(output.array) for output in self.outputs}
        inputs = [x for x in self.arguments if id(x) not in written]
        geometry: Any = None
        if self.tensor_map is not None:
            inputs.append(self.tensor_map.pointer.array)
            geometry = dataclasses.replace(self.tensor_map, pointer=None)
        parts = [x.tobytes() if isinstance(x, np.ndarray) else repr(x).encode() for x in inputs]
        parts += [repr((self.options, geometry)).encode()]
        parts += [f"{name}\0{text}".encode() for name, (text, _) in sorted(files.items())]
        digest = hashlib.sha256(b"\0".join(parts))
        kept = Path(folder or ".", f"{self.probe}-{digest.hexdigest()[:24]}.npz")
        if reason := hostcuda.unavailable():
            if not folder or not kept.exists():
                raise FileNotFoundError(f"no twin's result: {reason}, and {kept} is not there")
            with np.load(kept) as arrays:
                return [arrays[f"arr_{n}"] for n in range(len(self.outputs))]
        results = self.run_on_host()
        if folder:
            kept.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(kept, *results)
        return results


@dataclasses.dataclass(frozen=True)
class Measured:
    """How far two results of one output are apart: the largest difference, in units of the bound.

    Without a bound they agree to the bit.
    """

    name: str
    numbers: int
    worst: float | None
    unit: str

    def __str__(self) -> str:
        worst = "same bits" if self.worst is None else f"at most {self.worst:.3f} of {self.unit}"
        return f"{self.name:32} {self.numbers:9,} numbers  {worst}"


def compare(output: Output, actual: np.ndarray, expected: np.ndarray) -> Measured:
    """Raise AssertionError where ``actual`` is not ``expected``, or farther than the bound."""
    if output.bound is None:
        differ = np.flatnonzero(
            actual.reshape(-1).view(f"V{actual.itemsize}")
            != expected.reshape(-1).view(f"V{expected.itemsize}")
        )
        assert actual.dtype == expected.dtype
        assert not differ.size, f"{output.name}: {differ.size} differ, first at {differ[0]}"
        return Measured(output.name, output.numbers, None, "")
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(e)
    np.testing.assert_array_equal(a[~finite], e[~finite], err_msg=output.name)
    difference = np.abs(a[finite] - e[finite])
    bound = np.broadcast_to(output.bound, e.shape)[finite]
    assert np.isfinite(difference).all(), output.name
    ratio = np.where(difference == 0, 0.0, difference / np.where(bound == 0, 1e-300, bound))
    worst = float(ratio.max(initial=0.0))
    assert worst <= 1, f"{output.name}: {worst} times the bound, at {ratio.argmax()} of the finite"
    return Measured(output.name, output.numbers, worst, output.unit)
