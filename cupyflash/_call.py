# SPDX-License-Identifier: MIT
"""What is left of a call once its like has been made: put addresses into parameters, and launch.

Validation, the plan and the launch records depend on the shapes, strides, dtypes and alignment of
arrays and on the options, not on where the arrays lie. A :class:`Call` keeps what came of them; it
is found again by :func:`signature`, which costs a few microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cupyflash import _arrays, _compile, _problem, _sm80, _tensormap, devices
from cupyflash._tensormap import cuda_driver
from cupyflash.tiling import round_up

if TYPE_CHECKING:
    from cupyflash._launch import LaunchRecord
    from cupyflash._params import Pointer
    from cupyflash._problem import AttentionProblem
    from cupyflash.plan import Plan

_CALLS = 4096  # that are kept; then all are forgotten
_ALIGNMENT = 16  # bytes: the widest access, by which kernels choose how to read
# Types of options whose equal values mean equal calls, and which are hashable. Types are part of
# the signature: 1 == True, but only one of them is an option.
_PLAIN = frozenset((type(None), bool, int, float, str))
_PARAMS_ALIGNMENT = 64  # of tensor maps
_WORD = 8  # bytes of every field of a parameter struct
_WORKSPACE_ALIGNMENT = 256
_ZEROED = "counter"  # the workspace that begins as zeros
_COUNTS = "counts"  # the same, and its launch leaves it as zeros
_COUNTS_BYTES = 4 * _sm80.MAX_COUNTS
_KEPT_BYTES = 1 << 20  # of workspaces that begin as anything; larger ones are taken anew each time
_KEPT_STREAMS = 64  # that memory is kept for; then it is forgotten
_LEGACY_STREAM = 1  # and 0: streams that can't be captured
_THREAD_STREAM = 2  # each thread has its own under this number
# Programmatic dependent launch: the first compute capability, and the first driver that captures it
# in graphs.
_OVERLAPS_SINCE = (9, 0)
_OVERLAPS_DRIVER = 12030

_calls: dict[Any, Call] = {}
# Memory of each (device, stream, thread if its stream has the number of others): _kept_memory().
_kept: dict[tuple[int, int, int], Any] = {}


class _Threads(threading.local):
    """Of this thread: the devices that it has made its own once."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_threads = _Threads()


def signature(
    arrays: Sequence[Any], out: Any, window: Any, kernel: Any, *options: Any
) -> tuple[tuple[Any, ...] | None, list[int]]:
    """All that decides how a call runs, but for addresses; None where a look at values is needed.

    ``arrays`` are those of ``_problem.ARRAYS``, or None. The addresses of those that are there, and
    of ``out``, come beside it, for a call that is found by it.
    """
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    addresses: list[int] = []
    if ndarray is None:  # not imported, or another thread is about to
        return None, addresses
    for option in options:
        if type(option) not in _PLAIN:
            return None, addresses
    seen = [kernel, options, *map(type, options)]
    if window is not None:
        if type(window) is not tuple or not all(type(side) in _PLAIN for side in window):
            return None, addresses
        seen += (window, *map(type, window))
    for x in (*arrays, out):
        if x is None:
            seen.append(None)
        elif type(x) is ndarray:
            data = x.data
            address = data.ptr
            addresses.append(address)
            seen.append((x.shape, x.strides, x.dtype, address % _ALIGNMENT, data.device_id))
        else:
            return None, addresses
    return tuple(seen), addresses


def find(key: tuple[Any, ...]) -> Call | None:
    """The call that was made with this signature."""
    try:
        return _calls.get(key)
    except TypeError:  # an unhashable kernel=, to be refused by the plan
        return None


def run(
    plan: Plan,
    problem: AttentionProblem,
    arrays: Sequence[Any],
    out: Any,
    return_lse: bool,
    key: tuple[Any, ...] | None,
) -> tuple[Any, Any]:
    """Make a call for the first time, and keep it for the next of its signature."""
    from cupyflash import _launch

    cupy = _arrays.import_cupy()
    problem = problem.aligned()
    with cupy.cuda.Device(problem.device):
        # Each launch has workspaces of its own. To allocate them here too would, while a graph is
        # captured, record the clearing of memory that is not theirs any more when it is replayed.
        workspaces = _launch.Described
        o, lse, records = _launch.prepare(plan, problem, out, return_lse, cupy, workspaces)
        call = Call(problem, records, return_lse)
        used = [getattr(problem, name) for name in _problem.ARRAYS]
        addresses = [_arrays.address(x) for x in used if x is not None]
        call.launch(addresses, o, lse)
    # An array that had to be converted has to be converted each time.
    if key is not None and addresses == [_arrays.address(x) for x in arrays if x is not None]:
        if len(_calls) >= _CALLS:
            _calls.clear()
        _calls[key] = call
    return o, lse


def clear_cache() -> None:
    """Forget all built kernels, in this process and in the cache folder.

    The folder is ``CUPYFLASH_CACHE_DIR``, else ``cupyflash`` in the user's cache folder; only
    files that cupyflash wrote there are deleted. The next call of a kernel builds it anew.

    Examples
    --------
    >>> from cupyflash import clear_cache
    >>> clear_cache()  # doctest: +SKIP
    """
    _calls.clear()
    _kept.clear()
    _compile.clear_cache()


class Call:
    """A call without its arrays. Threads may share it.

    Work goes to the current stream of the device and is not waited for. Small workspaces of a
    single launch are kept for the next call on the stream; others are given back to CuPy's pool at
    once: the pool hands them out again to work of the same stream only, which runs after these
    launches.
    """

    def __init__(
        self, problem: AttentionProblem, records: Sequence[LaunchRecord], return_lse: bool
    ) -> None:
        self._device = problem.device
        self._out_shape = problem.out_shape
        self._dtype = problem.dtype
        self._lse_shape = problem.out_shape[:-1] if return_lse else None
        self._acc_dtype = problem.acc_dtype
        self._lock = threading.Lock()  # parameters are changed in place
        given = [n for n in _problem.ARRAYS if getattr(problem, n) is not None]
        spans = [(n, getattr(problem, name)) for n, name in enumerate(given)]
        self._spans = [(n, _span(array)) for n, array in spans if array.size]
        # Where a source's address stands in the list that a launch is given, and what is added.
        names = [*given, "o", *(["lse"] if return_lse else [])]
        places: dict[Any, tuple[int, int]] = {name: (n, 0) for n, name in enumerate(names)}
        for pointer in _argument_pointers(records):
            places[id(pointer.array)] = places[pointer.name.split(".")[1]]
        # One piece of memory holds all workspaces, those that begin as zeros in front; but for
        # counts, whose address comes last.
        self._workspace_bytes = self._zeroed_bytes = 0
        workspaces = _workspaces(records)
        counts = [pointer for pointer in workspaces if pointer.name == _COUNTS]
        places |= {id(pointer.array): (len(names) + 1, 0) for pointer in counts}
        self._has_counts = bool(counts)
        others = [pointer for pointer in workspaces if pointer.name != _COUNTS]
        for pointer in sorted(others, key=lambda p: p.name != _ZEROED):
            places[id(pointer.array)] = (len(names), self._workspace_bytes)
            self._workspace_bytes += round_up(max(1, pointer.array.nbytes), _WORKSPACE_ALIGNMENT)
            if pointer.name == _ZEROED:
                self._zeroed_bytes = self._workspace_bytes
        # Another thread's call on the stream may come between two launches of this one.
        small = self._workspace_bytes <= _KEPT_BYTES and not self._zeroed_bytes
        self._keeps = self._workspace_bytes > 0 and small and len(records) == 1
        self._launches = [_Launch(record, places, problem.device) for record in records]

    def __call__(self, arrays: Sequence[Any], addresses: list[int], out: Any) -> tuple[Any, Any]:
        """Run on arrays of the same signature; returns (o, lse or None), unfinished.

        ``addresses`` are those that came with it.
        """
        cupy = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() != self._device:
            with cupy.cuda.Device(self._device):
                return self(arrays, addresses, out)
        if out is None:
            out = cupy.ndarray(self._out_shape, self._dtype)
        else:
            addresses = addresses[:-1]
            first, end = _arrays.bounds(out)
            for n, (low, high) in self._spans:
                if addresses[n] + low < end and first < addresses[n] + high:
                    _problem.check_separate("attention", out, arrays)
        lse = None if self._lse_shape is None else cupy.ndarray(self._lse_shape, self._acc_dtype)
        self.launch(addresses, out, lse)
        return out, lse

    def launch(self, addresses: list[int], o: Any, lse: Any) -> None:
        """Launch on the current stream of the current device; ``addresses`` of the arguments."""
        cuda = sys.modules["cupy"].cuda
        if self._device not in _threads.devices:
            # The driver launches into the thread's context. Where memory comes from CuPy's pool,
            # nothing that came before has given a new thread one.
            cuda.runtime.setDevice(self._device)
            cuda.runtime.memGetInfo()
            _threads.devices.add(self._device)
        stream = cuda.get_current_stream().ptr
        addresses = [*addresses, o.data.ptr]
        if lse is not None:
            addresses.append(lse.data.ptr)
        kept = memory = None  # held until all is launched
        if self._workspace_bytes:
            if stream > _LEGACY_STREAM and cuda.runtime.streamIsCapturing(stream):
                self._launch_in_graph(addresses, stream)
                return
            if self._keeps or self._has_counts:
                kept = _kept_memory(self._device, stream)
            if not self._keeps:
                memory = cuda.alloc(self._workspace_bytes)
                if self._zeroed_bytes:
                    memory.memset_async(0, self._zeroed_bytes)
            addresses.append(memory.ptr if memory is not None else kept.ptr + _COUNTS_BYTES)
            if self._has_counts:
                addresses.append(kept.ptr)
        with self._lock:
            for launch in self._launches:
                launch(addresses, stream)

    def _launch_in_graph(self, addresses: list[int], stream: int) -> None:
        """With a workspace that the graph allocates when it runs, and frees: nobody else has it."""
        driver = cuda_driver()
        handle = driver.CUstream(stream)
        counts_bytes = _COUNTS_BYTES if self._has_counts else 0
        in_all = counts_bytes + self._workspace_bytes
        status, memory = driver.cuMemAllocAsync(in_all, handle)
        _check(status, "allocate a workspace in a graph")
        try:
            if zeroed_bytes := counts_bytes + self._zeroed_bytes:
                (status,) = driver.cuMemsetD8Async(memory, 0, zeroed_bytes, handle)
                _check(status, "clear a workspace in a graph")
            counts = int(memory)
            addresses = [*addresses, counts + counts_bytes, counts]
            with self._lock:
                for launch in self._launches:
                    launch(addresses, stream)
        finally:
            (status,) = driver.cuMemFreeAsync(memory, handle)
        _check(status, "free a workspace in a graph")


def _kept_memory(device: int, stream: int) -> Any:
    """Zeros for launches that leave zeros, so that nobody has to clear them; then a workspace.

    All launches of a stream share it, since they run one after another. Streams are told apart as
    CuPy's pool tells them apart, which takes memory back from one and gives it to the next under
    the same number: as there, work that is pending when its stream is destroyed, or the thread that
    has a stream of its own ends, must not meet that of the next one. A launch that is refused has
    counted nothing, and behind a kernel that fails the device takes no more launches of the
    process.
    """
    key = (device, stream, threading.get_ident() if stream == _THREAD_STREAM else 0)
    memory = _kept.get(key)
    if memory is None:
        if len(_kept) >= _KEPT_STREAMS:
            _kept.clear()
        memory = sys.modules["cupy"].cuda.alloc(_COUNTS_BYTES + _KEPT_BYTES)
        memory.memset_async(0, _COUNTS_BYTES)
        # Another thread may use the same stream: what is found was cleared in it before.
        memory = _kept.setdefault(key, memory)
    return memory


def _span(array: Any) -> tuple[int, int]:
    """Where the first and one behind the last byte of an array lie, from its address on."""
    first, end = _arrays.bounds(array)
    address = _arrays.address(array)
    return first - address, end - address


def _check(status: Any, what: str) -> None:
    if status:
        raise RuntimeError(f"cupyflash: the driver refuses to {what}: {status.name}")


def _argument_pointers(records: Sequence[LaunchRecord]) -> list[Pointer]:
    """The pointers to arguments and results."""
    return [p for record in records for p in record.pointers if p.name.startswith("problem.")]


def _workspaces(records: Sequence[LaunchRecord]) -> list[Pointer]:
    """A pointer to each array that is neither argument nor result."""
    known = {id(pointer.array) for pointer in _argument_pointers(records)}
    found: dict[int, Pointer] = {}
    for record in records:
        for pointer in record.pointers:
            if id(pointer.array) not in known:
                found.setdefault(id(pointer.array), pointer)
    return list(found.values())


@functools.cache
def _overlaps(device: int) -> bool:
    """Whether a launch may begin while the one before it ends."""
    status, version = cuda_driver().cuDriverGetVersion()
    _check(status, "tell its version")
    capability = devices.current_device(device).compute_capability
    return capability >= _OVERLAPS_SINCE and version >= _OVERLAPS_DRIVER


class _Launch:
    """One launch: its parameters as the driver wants them, and where addresses go in them."""

    def __init__(
        self, record: LaunchRecord, places: dict[Any, tuple[int, int]], device: int
    ) -> None:
        driver = cuda_driver()
        self._name = record.kernel
        # Held, for the driver's handle is valid as long as it lives.
        self._function = _compile.load(record.kernel, record.options, device, record.smem_bytes)
        self._handle = driver.CUfunction(self._function.kernel.ptr)
        size = len(record.params)
        self._memory = ctypes.create_string_buffer(size + _PARAMS_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        front = -start % _PARAMS_ALIGNMENT
        self._params = start + front
        ctypes.memmove(self._params, record.params, size)
        words = memoryview(self._memory).cast("B")[front : front + size]
        self._words = words.cast("Q")
        self._argument = (ctypes.c_void_p * 1)(self._params)
        self._arguments = ctypes.addressof(self._argument)
        self._slots = []
        for p in record.pointers:
            place, offset = places[id(p.array)]
            self._slots.append((p.offset // _WORD, place, offset + p.byte_offset))
        self._maps = []
        for tensor_map in record.tensor_maps:
            p = tensor_map.pointer
            encoded = _tensormap.encode(tensor_map, _arrays.address(p.array) + p.byte_offset)
            self._maps.append((places[p.name][0], p.byte_offset, p.offset, encoded))
        # As many as the maps' arrays, which are the first arguments; None differs from all.
        self._mapped: list[int | None] = [None] * len(self._maps)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = record.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = record.block
        config.sharedMemBytes = record.smem_bytes
        if record.waits_itself and _overlaps(device):
            attribute = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self._config = config
        self._stream: int | None = None
        self._launch = driver.cuLaunchKernelEx

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        words = self._words
        for word, place, offset in self._slots:
            words[word] = addresses[place] + offset
        if (mapped := addresses[: len(self._mapped)]) != self._mapped:
            for place, added, offset, encoded in self._maps:
                _tensormap.replace_address(encoded, addresses[place] + added)
                ctypes.memmove(self._params + offset, int(encoded.getPtr()), _tensormap.BYTES)
            self._mapped = mapped
        if stream != self._stream:
            self._config.hStream = cuda_driver().CUstream(stream)
            self._stream = stream
        (status,) = self._launch(self._config, self._handle, self._arguments, 0)
        if status:
            _check(status, f"launch kernel {self._name!r}")
