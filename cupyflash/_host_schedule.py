# SPDX-License-Identifier: MIT
"""How attention on the host is cut into tiles and tasks, and who does them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupyflash._problem import AttentionProblem

# Scores of a tile stay in a core's L2 cache through all their passes: 512 KiB of float32.
_TILE_SCORES = 2**17
_MAX_ROWS = 256
_MAX_KEYS = 4096
# Elements of K and V in one tile, and of Q and O in one block, where the head dim is large.
_TILE_OPERANDS = 2**19
# Query blocks that share a converted tile of K and V.
_BLOCKS_PER_CONVERSION = 4
# Multiplications below which starting a thread (about 0.1 ms) costs more than it saves.
_THREAD_WORK = 2**26
_WORKING_BYTES = 40 * 2**20


@dataclasses.dataclass(frozen=True)
class Task:
    """Rows ``start`` to ``stop`` of some heads of one batch entry."""

    entry: tuple[int, ...]
    heads_k: slice
    group: slice
    start: int
    stop: int


class Workspace:
    """One thread's arrays, which last for a call: a name stands for one piece of memory."""

    def __init__(self) -> None:
        self._memory: dict[Any, np.ndarray] = {}

    def array(self, name: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, dtype)
        return memory[:size].reshape(shape)


def blas_takes(x: np.ndarray, acc_dtype: np.dtype) -> bool:
    """Whether BLAS reads the last two axes in place, exactly as it would a contiguous copy."""
    row, element = x.strides[-2:]
    # A single column would be a vector to BLAS, and its kernels may depend on a vector's stride.
    return (
        x.dtype == acc_dtype
        and x.flags.aligned
        and element == x.itemsize
        and row % x.itemsize == 0
        and x.shape[-1] > 1
        and x.shape[-1] <= row // x.itemsize < 2**31
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Block and tile edges, and how the work is cut into tasks."""

    problem: AttentionProblem
    Br: int
    Bc: int
    heads_k: int  # key heads in a task
    group: int  # query heads of each of them in a task
    rows: int  # query rows in a task
    workers: int
    in_place: bool  # K and V are read by BLAS where they lie

    @classmethod
    def of(cls, problem: AttentionProblem, allowed_threads: int) -> Schedule:
        width = problem.head_dim + problem.head_dim_v
        # Sizes of one head rule these two alone; all else here changes no bit of the result.
        Br = max(1, min(problem.seqlen_q, _MAX_ROWS, max(16, _TILE_OPERANDS // width)))
        Bc = min(_TILE_SCORES // Br, _MAX_KEYS, max(16, _TILE_OPERANDS // width))

        in_place = blas_takes(problem.k, problem.acc_dtype) and blas_takes(
            problem.v, problem.acc_dtype
        )
        schedule = cls(problem, Br, Bc, 1, 1, rows=Br, workers=1, in_place=in_place)
        group = schedule._as_many_as_fit("group", problem.group)
        schedule = dataclasses.replace(schedule, group=group)
        if group == problem.group:
            # Small heads share numpy's calls.
            heads_k = schedule._as_many_as_fit("heads_k", problem.heads_k)
            schedule = dataclasses.replace(schedule, heads_k=heads_k)
        work = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k * width
        if work >= _THREAD_WORK:
            schedule = schedule._for_threads(allowed_threads)
        blocks = max(1, -(-problem.seqlen_q // Br))
        if not in_place:
            rows = Br * min(_BLOCKS_PER_CONVERSION, blocks)
            while rows > Br and dataclasses.replace(schedule, rows=rows).is_too_coarse:
                rows -= Br
            schedule = dataclasses.replace(schedule, rows=rows)
        return schedule

    def _as_many_as_fit(self, field: str, available: int) -> int:
        """How many heads fill a tile; at least one."""
        one = dataclasses.replace(self, **{field: 1}).tile_elements
        more = dataclasses.replace(self, **{field: 2}).tile_elements - one
        return max(1, min(available, 1 + (_TILE_SCORES - one) // more))

    def _for_threads(self, allowed_threads: int) -> Schedule:
        workers = max(1, min(allowed_threads, _WORKING_BYTES // self.worker_bytes))
        schedule = dataclasses.replace(self, workers=workers)
        for field in ("heads_k", "group"):
            while getattr(schedule, field) > 1 and schedule.is_too_coarse:
                halved = {field: -(-getattr(schedule, field) // 2)}
                schedule = dataclasses.replace(schedule, **halved)
        return dataclasses.replace(schedule, workers=min(workers, max(1, len(schedule))))

    @property
    def tile_elements(self) -> int:
        """Elements that the passes over one tile touch."""
        problem = self.problem
        keys = max(1, min(self.Bc, problem.seqlen_k))
        width = problem.head_dim + problem.head_dim_v
        per_query_head = self.Br * (keys + width)
        if problem.has_mask or problem.bias_dtype:
            per_query_head += keys * problem.head_dim_v  # V without its hidden keys
        converted = 0 if self.in_place else keys * width
        return self.heads_k * (self.group * per_query_head + converted)

    @property
    def worker_bytes(self) -> int:
        """Bound of a workspace: the tile, ALiBi's copy of it, P V, and a task's other blocks."""
        blocks = _BLOCKS_PER_CONVERSION * self.heads_k * self.group * self.Br
        width = self.problem.head_dim + 3 * self.problem.head_dim_v
        return (2 * self.tile_elements + blocks * width) * self.problem.acc_dtype.itemsize

    @property
    def is_too_coarse(self) -> bool:
        """Whether threads would wait for the one that took the last task."""
        return self.workers > 1 and len(self) < 4 * self.workers

    def _cuts(self) -> tuple[range, range, range]:
        problem = self.problem
        return (
            range(0, problem.seqlen_q, self.rows),
            range(0, problem.heads_k, self.heads_k),
            range(0, problem.group, self.group),
        )

    def __len__(self) -> int:
        return self.problem.batch * math.prod(map(len, self._cuts()))

    def __iter__(self) -> Iterator[Task]:
        problem = self.problem
        rows, heads_k, groups = self._cuts()
        # The last rows first: under a causal mask these take longest.
        for start in reversed(rows):
            stop = min(start + self.rows, problem.seqlen_q)
            for entry in itertools.product(*map(range, problem.batch_shape)):
                for head, member in itertools.product(heads_k, groups):
                    yield Task(
                        entry,
                        slice(head, head + self.heads_k),
                        slice(member, member + self.group),
                        start,
                        stop,
                    )


def share_out(
    schedule: Schedule,
    work: Callable[[Task, Workspace], None],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Do all tasks on ``schedule.workers`` threads, the caller's own among them."""
    tasks, total = iter(schedule), len(schedule)
    done = 0
    lock = threading.Lock()
    failures: list[BaseException] = []

    def drain() -> None:
        nonlocal done
        workspace = Workspace()
        try:
            # Infinities and NaN in, or made by, the scores are answered by the result alone.
            with np.errstate(all="ignore"):
                while True:
                    with lock:
                        task = None if failures else next(tasks, None)
                    if task is None:
                        return
                    work(task, workspace)
                    if progress is not None:
                        with lock:
                            done += 1
                            progress(done, total)
        except BaseException as failure:  # raised again by the caller's thread
            failures.append(failure)

    threads: list[threading.Thread] = []
    try:
        for _ in range(schedule.workers - 1):
            threads.append(threading.Thread(target=drain))
            threads[-1].start()
    except RuntimeError:
        pass  # the system gives no more threads: those that there are do the work
    except BaseException as failure:  # Ctrl-C: nobody may write on after the call
        failures.append(failure)
    drain()
    _join(threads, failures)
    if failures:
        raise failures[0]


def _join(threads: list[threading.Thread], failures: list[BaseException]) -> None:
    """Wait for all threads, through a Ctrl-C too, which makes each stop after its task."""
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as failure:
                failures.append(failure)


class SingleThreadedBlas:
    """Holds the BLAS to one thread while at least one call runs; entering gives what it had.

    The number of threads is global to the process: the first call in saves it and the last one out
    restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libraries: list[Any] | None = None
        self._saved: list[int] = []
        self._calls = 0

    def __enter__(self) -> int:
        with self._lock:
            if self._libraries is None:
                # Imported and searched for at the first call: it takes milliseconds.
                import threadpoolctl

                found = threadpoolctl.ThreadpoolController().select(user_api="blas")
                self._libraries = [lib for lib in found.lib_controllers if lib.num_threads]
            if self._calls == 0:
                self._saved = [library.num_threads for library in self._libraries]
                for library in self._libraries:
                    library.set_num_threads(1)
            self._calls += 1
            processors = _processors()
            return min(processors, max(self._saved, default=processors))

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0:
                for library, threads in zip(self._libraries or (), self._saved, strict=True):
                    library.set_num_threads(threads)


single_threaded_blas = SingleThreadedBlas()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
