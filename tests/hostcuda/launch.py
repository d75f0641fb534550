# SPDX-License-Identifier: MIT
"""Interpret a launch record on the CPU, with numpy arrays."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from hostcuda import process
from hostcuda.modules import compiled, source_of

# What any GPU refuses to launch; shared memory is the largest that one offers (compute capability
# 9.0 and 10.0).
_GRID_LIMIT = (2**31 - 1, 65535, 65535)
_BLOCK_LIMIT = (1024, 1024, 64)
_THREADS_LIMIT = 1024
_SMEM_LIMIT = 227 * 1024
_ALIGNMENT = 512  # of an allocation on a GPU
_GUARD = 0xFF
_ORDERS = ("forward", "reverse", "random")
_LANDINGS = ("late", "eager", "random", "newest")


class HostFault(Exception):
    """A kernel did on the CPU what it must not do; the message is the report.

    Attributes
    ----------
    report : str
        What the sanitizer or the scheduler printed.
    """

    def __init__(self, summary: str, report: str) -> None:
        super().__init__(f"{summary}\n{report}")
        self.report = report


@dataclass(frozen=True)
class Schedule:
    """In which order things happen that a GPU may do in any order.

    Attributes
    ----------
    order : {"forward", "reverse", "random"}
        Of blocks, and of the threads of a block between two of its barriers. The first thread in
        the order that can go on does, so that one warp runs as far ahead as the program lets it.
        Random: an even seed draws the next thread anew at each step, an odd one draws an order at
        each barrier.
    landing : {"late", "eager", "random", "newest"}
        When an asynchronous operation takes effect: when it is waited for, at once, or at any time;
        "newest": only when no thread can go on, copies first and the newest of them, then products.
    seed : int
        For what is random.
    poison : int
        The two bytes that shared memory holds, over and over, before anything is written. 0x7FFF
        makes a NaN of every float and a large number of every int: kernels that take a leftover of
        another one for a length run on and on.
    """

    order: str = "forward"
    landing: str = "late"
    seed: int = 0
    poison: int = 0x7FFF

    def __post_init__(self) -> None:
        if self.order not in _ORDERS:
            raise ValueError(f"Schedule: order is {self.order!r}; expected one of {_ORDERS}")
        if self.landing not in _LANDINGS:
            raise ValueError(f"Schedule: landing is {self.landing!r}; expected one of {_LANDINGS}")


# How often kernels of this project have run in this process, by kernel and options.
launches: Counter[tuple[str, tuple[str, ...]]] = Counter()

SCHEDULES = (
    Schedule(),
    Schedule("reverse", "eager"),
    Schedule("random", "random", seed=2),
    Schedule("random", "random", seed=3, poison=0x3C3C),
    Schedule("forward", "newest"),
)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """As ``numpy.empty``, but what is read before it is written is NaN.

    With it this package serves as the array namespace of whatever allocates for a launch.
    """
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = _GUARD
    return array


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """As ``numpy.zeros``, for the same use as :func:`empty`."""
    return np.zeros(shape, dtype)


def _root_address(array: np.ndarray) -> int:
    """Where the memory begins that the array is a view of: an allocation of its own on a GPU."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return byte_bounds(root)[0]


class _Argument:
    """One array, in a block of exactly the bytes that it spans."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name = name
        self.array = array
        if array.size == 0:
            self.low = array.__array_interface__["data"][0]
            self.span = 0
        else:
            self.low, high = byte_bounds(array)
            self.span = high - self.low
        self.offset = (self.low - _root_address(array)) % _ALIGNMENT
        self.first = array.__array_interface__["data"][0] - self.low
        self.gaps = self.span != array.size * array.itemsize
        # What lies between the elements of the view is NaN to a kernel that reads it.
        self.sent = np.full(self.span, _GUARD, np.uint8)
        if array.size:
            self.view(self.sent)[...] = array

    def view(self, block: np.ndarray) -> np.ndarray:
        array = self.array
        return np.ndarray(array.shape, array.dtype, block.data, self.first, array.strides)

    def key(self) -> tuple[Any, ...]:
        array = self.array
        return (self.low, self.span, array.shape, array.strides, array.dtype.str)

    def gap_written(self, block: np.ndarray) -> int | None:
        """The first byte that a kernel changed between the elements of the view."""
        if not self.gaps or not self.span:
            return None
        inside = np.zeros(self.span, np.uint8)
        array = self.array
        bytes_of = (*array.shape, array.itemsize)
        np.ndarray(bytes_of, np.uint8, inside.data, self.first, (*array.strides, 1))[...] = 1
        changed = np.flatnonzero((block != self.sent) & (inside == 0))
        return int(changed[0]) if changed.size else None


class _Request:
    """A record's launch in bytes, to be sent any number of times."""

    def __init__(self, record: Any, ours: bool) -> None:
        _check_limits(record)
        self.record = record
        self.ours = ours  # of the project's kernels, as they stand
        self.arguments: list[_Argument] = []
        found: dict[tuple[Any, ...], int] = {}
        pointers = []
        tensor_maps = getattr(record, "tensor_maps", ())
        for pointer in (*record.pointers, *(m.pointer for m in tensor_maps)):
            if pointer.offset % 8 or not 0 <= pointer.offset <= len(record.params) - 8:
                raise ValueError(
                    f"run: pointer {pointer.name!r} is at offset {pointer.offset} of "
                    f"{len(record.params)} bytes of params; expected a multiple of 8 inside them"
                )
            argument = _Argument(pointer.name, pointer.array)
            # The same view twice is one array to the kernel.
            index = found.setdefault(argument.key(), len(self.arguments))
            if index == len(self.arguments):
                self.arguments.append(argument)
            first = argument.first + getattr(pointer, "byte_offset", 0)
            pointers.append((pointer.offset, index, first))
        params = bytearray(record.params)
        for tensor_map in tensor_maps:
            at = tensor_map.pointer.offset + 8  # behind the address
            geometry = _geometry(tensor_map)
            params[at : at + len(geometry)] = geometry
        self.tail = [struct.pack("<QQ", len(self.arguments), len(pointers))]
        self.tail += [struct.pack("<QQ", a.offset, a.span) for a in self.arguments]
        self.tail += [struct.pack("<QQQ", *p) for p in pointers]
        self.tail += [bytes(params), *(a.sent.data for a in self.arguments if a.span)]

    def run(self, program: Path, schedule: Schedule, timeout: float):
        """Returns the arguments' blocks after the launch, and what the kernel printed."""
        record = self.record
        head = struct.pack(
            "<6IQIIQII",
            *record.grid,
            *record.block,
            record.smem_bytes,
            _ORDERS.index(schedule.order),
            _LANDINGS.index(schedule.landing),
            schedule.seed,
            schedule.poison,
            len(record.params),
        )
        if 0 in record.grid:
            return [a.sent for a in self.arguments], ""
        try:
            request = [b"".join([head, *self.tail])]
            sizes = [a.span for a in self.arguments]
            blocks, printed = process.server(program).launch(request, sizes, timeout)
        except process.ServerDied as died:
            process.forget(program)
            raise HostFault(self._summary(schedule), str(died)) from None
        if self.ours:
            launches[record.kernel, tuple(record.options)] += 1
        return [np.frombuffer(block, np.uint8) for block in blocks], printed

    def check(self, blocks: list[np.ndarray], schedule: Schedule, writes: set[str] | None) -> None:
        """Raises HostFault where a kernel wrote what it must not."""
        for argument, block in zip(self.arguments, blocks, strict=True):
            at = argument.gap_written(block)
            if at is not None:
                raise HostFault(
                    self._summary(schedule),
                    f"a write between the elements of {argument.name}, {at - argument.first} bytes "
                    f"from its first (strides {argument.array.strides})",
                )
            allowed = argument.name in writes if writes is not None else True
            if not (allowed and argument.array.flags.writeable) and (block != argument.sent).any():
                raise HostFault(self._summary(schedule), f"a write to the input {argument.name}")

    def store(self, blocks: list[np.ndarray]) -> None:
        """The arrays as the launch left them."""
        for argument, block in zip(self.arguments, blocks, strict=True):
            if argument.array.flags.writeable and argument.array.size:
                argument.array[...] = argument.view(block)

    def _summary(self, schedule: Schedule) -> str:
        record = self.record
        what = " ".join((record.kernel, *record.options))
        return f"{what} grid {record.grid} block {record.block} {schedule}"


def _geometry(tensor_map: Any) -> bytes:
    """What hostcuda/ptx/tma.cuh reads of a tensor map behind its address."""
    # As the driver does when it encodes one.
    if any(stride % 16 or stride < 0 for stride in tensor_map.strides):
        raise ValueError(f"run: a tensor map has the strides {tensor_map.strides}")
    if not all(0 < n <= 256 for n in tensor_map.box):
        raise ValueError(f"run: a tensor map has the box {tensor_map.box}")
    itemsize = tensor_map.pointer.array.dtype.itemsize
    return struct.pack(
        "<5Q4Q5I2I",
        *tensor_map.sizes,
        *tensor_map.strides,
        *tensor_map.box,
        itemsize,
        tensor_map.swizzle,
    )


def _check_limits(record: Any) -> None:
    for name, size, limit in (
        ("grid", record.grid, _GRID_LIMIT),
        ("block", record.block, _BLOCK_LIMIT),
    ):
        low = 0 if name == "grid" else 1
        if any(not low <= n <= most for n, most in zip(size, limit, strict=True)):
            raise ValueError(f"run: {name} is {size}; a GPU takes at most {limit}")
    threads = record.block[0] * record.block[1] * record.block[2]
    if threads > _THREADS_LIMIT:
        raise ValueError(
            f"run: block {record.block} has {threads} threads; at most {_THREADS_LIMIT}"
        )
    if record.smem_bytes > _SMEM_LIMIT:
        raise ValueError(f"run: smem_bytes is {record.smem_bytes}; a GPU has at most {_SMEM_LIMIT}")


def run(
    record: Any,
    *,
    schedule: Schedule | None = None,
    sanitizer: str = "address",
    writes: Iterable[str] | None = None,
    kernels: Path | None = None,
    source: str | None = None,
    timeout: float = 60.0,
) -> str:
    """Run one launch on the CPU and put its results into the record's arrays.

    Parameters
    ----------
    record : LaunchRecord
        As the GPU path launches it, with numpy arrays.
    schedule : Schedule, optional
        Threads and blocks in ascending order by default.
    sanitizer : {"address", "thread", "none"}
        AddressSanitizer and the checks of undefined behaviour, or ThreadSanitizer for data races
        between threads of a block, or neither, for speed.
    writes : iterable of str, optional
        The names of the pointers that the kernel may write through. A write to any other array, or
        to one that numpy says is not writeable, is a fault. By default all that are writeable.
    kernels : Path, optional
        Root of the sources, instead of the project's ``kernels/``.
    source : str, optional
        Text used in place of ``<kernel>.cu``.
    timeout : float
        Seconds after which a launch that does not end is a fault.

    Returns
    -------
    str
        What the kernel printed.

    Raises
    ------
    HostFault
        With the report of what the kernel did wrong.
    CompileError
        If g++ refuses the kernel.
    ValueError
        If a GPU would refuse the launch.
    """
    request = _Request(record, kernels is None and source is None)
    program = compiled(source_of(record, kernels, source), sanitizer)
    schedule = schedule or Schedule()
    blocks, printed = request.run(program, schedule, timeout)
    request.check(blocks, schedule, None if writes is None else set(writes))
    request.store(blocks)
    return printed


def run_schedules(
    record: Any,
    *,
    schedules: Iterable[Schedule] = SCHEDULES,
    sanitizer: str = "address",
    writes: Iterable[str] | None = None,
    kernels: Path | None = None,
    source: str | None = None,
    timeout: float = 60.0,
) -> None:
    """Run one launch under several schedules, each from the same inputs, and compare all arrays.

    What the order of threads, the landing of copies or unwritten shared memory can change is a
    fault, whatever the values: a missing barrier shows up here. Parameters as of :func:`run`.

    Raises
    ------
    HostFault
        If two schedules differ in any bit, or for what :func:`run` raises.
    """
    request = _Request(record, kernels is None and source is None)
    program = compiled(source_of(record, kernels, source), sanitizer)
    allowed = None if writes is None else set(writes)
    first: tuple[Schedule, list[np.ndarray]] | None = None
    for schedule in schedules:
        blocks, _ = request.run(program, schedule, timeout)
        request.check(blocks, schedule, allowed)
        if first is None:
            first = schedule, blocks
            continue
        for argument, one, other in zip(request.arguments, first[1], blocks, strict=True):
            differ = np.flatnonzero(one != other)
            if differ.size:
                at = (int(differ[0]) - argument.first) // argument.array.itemsize
                raise HostFault(
                    request._summary(schedule),
                    f"{argument.name} differs from what {first[0]} gave, in {differ.size} bytes, "
                    f"first at the element {at} places from the array's first; a barrier or a wait "
                    "is missing, or shared memory is read before it is written",
                )
    if first is not None:
        request.store(first[1])
