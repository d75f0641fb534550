# SPDX-License-Identifier: MIT
"""How ``bench`` measures: samples of every candidate, interleaved, and their medians.

Nothing here knows a GPU: a :class:`Workbench` prepares candidates and times their calls
(``_bench_gpu.py`` has the one of CuPy and torch), ``_bench_report.py`` renders what comes out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cupyflash._bench_grids import Row
from cupyflash._messages import one_line

OURS = "ours"
PLAIN = "plain call"
CUPY = "CuPy"
CUDNN = "cuDNN"
FLASH2 = "FlashAttention-2"
EFFICIENT = "mem.-efficient"
UNFUSED = "torch unfused"
TORCH = "torch's choice"
# By the names that options use, in the order of tables.
PEERS = {
    "cudnn": CUDNN,
    "fa2": FLASH2,
    "efficient": EFFICIENT,
    "unfused": UNFUSED,
    "torch": TORCH,
    "cupy": CUPY,
}

_SAMPLE_SECONDS = 3e-3  # long against the resolution of the clock
_SLOW_SECONDS = 0.03  # what the first call's latency no longer distorts
_MOST_CALLS = 50  # in a sample: what the launch queue of a stream holds
_FEWEST_SAMPLES = 3
_LEAST_ROW_SECONDS = 0.05


@dataclasses.dataclass
class Candidate:
    """Something that can run a row.

    ``call(i)`` enqueues one call on the i-th set of inputs, cyclically, and returns its output;
    ``around`` is entered around a series of calls. Without ``call``, ``reason`` says why.
    """

    name: str
    call: Callable[[int], Any] | None = None
    reason: str = ""
    kernel: str = ""
    tile: tuple[int, int] | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one candidate did on one row.

    Parameters
    ----------
    row : Row
    candidate : str
    seconds : float, optional
        Median time of a call; None where ``reason`` says why there is none.
    spread : float
        Largest minus smallest sample, over the median.
    samples : int
    error : float, optional
        ``||o - ref|| / ||ref||`` against float64 on a slice.
    kernel : str
        Which of our kernels ran.
    tile : tuple of int, optional
        Its B_r and B_c.
    reason : str
        Why there is no time, or no error.
    """

    row: Row
    candidate: str
    seconds: float | None = None
    spread: float = 0.0
    samples: int = 0
    error: float | None = None
    kernel: str = ""
    tile: tuple[int, int] | None = None
    reason: str = ""

    @property
    def rate(self) -> float | None:
        """In the unit of the row; the plain call has the plain row's work."""
        if self.seconds is None:
            return None
        plain = self.candidate == PLAIN and bool(self.row.option)
        return (dataclasses.replace(self.row, option="") if plain else self.row).rate(self.seconds)


@dataclasses.dataclass
class Report:
    """All that a run found out; the files that ``bench`` writes are made of this alone.

    ``machine`` has a text for each name; ``matmul`` is the rate of a matrix product in TFLOP/s for
    each dtype, measured in the same run.
    """

    machine: dict[str, str] = dataclasses.field(default_factory=dict)
    matmul: dict[str, float] = dataclasses.field(default_factory=dict)
    timings: list[Timing] = dataclasses.field(default_factory=list)


class Workbench(Protocol):
    """Where candidates come from and are timed."""

    def machine(self) -> dict[str, str]:
        """Names and versions of what computes."""

    def matmul(self, dtype: str) -> float | None:
        """TFLOP/s of a large matrix product; None where none can run."""

    def row(self, row: Row) -> contextlib.AbstractContextManager[list[Candidate]]:
        """Make the inputs of a row, and its candidates; give the memory back at the end."""

    def finish(self) -> None:
        """Wait for what was enqueued, and raise what went wrong in it."""

    def timer(self, row: Row, candidate: Candidate) -> Callable[[int, int], float]:
        """A function of ``first`` and ``calls`` that gives the seconds of one call."""

    def error(self, row: Row, output: Any) -> float:
        """Of the output for the first set of inputs, against float64."""


def run(
    bench: Workbench,
    rows: Sequence[Row],
    report: Report,
    *,
    rounds: int,
    seconds: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Measure all rows, adding to ``report`` as each is done, so that it can be interrupted.

    Parameters
    ----------
    bench : Workbench
    rows : sequence of Row
    report : Report
    rounds : int
        Samples of each candidate, unless time is short.
    seconds : float
        What to stay within by taking fewer samples; what is left is divided among the rows left.
    progress : callable, optional
        Called with the number of rows done and of all.
    clock : callable, optional
    """
    deadline = clock() + seconds
    report.machine.update(bench.machine())
    for dtype in dict.fromkeys(row.dtype for row in rows):
        rate = bench.matmul(dtype)
        if rate is not None:
            report.matmul[dtype] = rate
    for done, row in enumerate(rows):
        budget = max((deadline - clock()) / (len(rows) - done), _LEAST_ROW_SECONDS)
        report.timings += measure_row(bench, row, rounds, budget)
        progress(done + 1, len(rows))


def measure_row(bench: Workbench, row: Row, rounds: int, seconds: float) -> list[Timing]:
    """Time the candidates of one row in turns.

    Neither what a candidate raises nor a row that does not fit the memory ends the run: the reason
    stands in the Timing.
    """
    try:
        with bench.row(row) as candidates:
            return _measure(bench, row, candidates, rounds, seconds)
    except Exception as error:  # of CuPy, torch, the driver, ...
        return [Timing(row, OURS, reason=failure(error))]


def _measure(
    bench: Workbench, row: Row, candidates: list[Candidate], rounds: int, seconds: float
) -> list[Timing]:
    timings = {c.name: Timing(row, c.name, kernel=c.kernel, tile=c.tile) for c in candidates}
    able: dict[str, Candidate] = {}
    timers, series, times = {}, {}, {}

    def note(candidate: Candidate, **what: Any) -> None:
        timings[candidate.name] = dataclasses.replace(timings[candidate.name], **what)

    for candidate in candidates:
        if candidate.call is None:
            note(candidate, reason=candidate.reason)
            continue
        try:
            with candidate.around():
                output = candidate.call(0)  # builds kernels
            bench.finish()
            try:
                if candidate.name != PLAIN:  # which computes something else than the row
                    note(candidate, error=bench.error(row, output))
            except Exception as error:
                note(candidate, reason=f"no error: {failure(error)}")
            del output
            timer = timers[candidate.name] = bench.timer(row, candidate)
            estimate = timer(0, 1)
            series[candidate.name] = timer(0, 2) if estimate < _SLOW_SECONDS else estimate
            able[candidate.name] = candidate
        except Exception as error:
            note(candidate, reason=failure(error))
    plans = sampling(series, rounds, seconds)
    for turn in range(rounds):
        for name, candidate in list(able.items()):
            samples, calls = plans[name]
            if turn >= samples:
                continue
            try:
                times.setdefault(name, []).append(timers[name](turn * calls, calls))
            except Exception as error:
                note(candidate, reason=failure(error), error=None)
                times.pop(name, None)
                del able[name]
    for name, found in times.items():
        median = statistics.median(found)
        spread = (max(found) - min(found)) / median if median else 0.0
        note(able[name], seconds=median, spread=spread, samples=len(found))
    return list(timings.values())


def sampling(
    estimates: dict[str, float], rounds: int, seconds: float
) -> dict[str, tuple[int, int]]:
    """How many samples to take of each candidate, and of how many calls.

    A sample takes a few milliseconds; slow candidates give fewer, so that none takes more than its
    share of ``seconds``.

    Examples
    --------
    >>> sampling({"fast": 1e-3, "slow": 0.1, "crawling": 5.0}, rounds=7, seconds=1.2)
    {'fast': (7, 3), 'slow': (4, 1), 'crawling': (1, 1)}
    """
    share = seconds / max(len(estimates), 1)
    plans = {}
    for name, estimate in estimates.items():
        estimate = max(estimate, 1e-9)
        calls = min(max(round(_SAMPLE_SECONDS / estimate), 1), _MOST_CALLS)
        fewest = _FEWEST_SAMPLES if _FEWEST_SAMPLES * estimate <= share else 1
        samples = min(max(int(share / (calls * estimate) + 1e-9), fewest), rounds)
        plans[name] = (samples, calls)
    return plans


def failure(error: BaseException) -> str:
    """Why a candidate failed, short enough for a footnote."""
    text = one_line(error)
    if "out of memory" in text.lower() or "OutOfMemory" in type(error).__name__:
        return "out of memory"
    return text if len(text) <= 200 else f"{text[:197]}..."


def ratio(timing: Timing | None, other: Timing | None) -> float | None:
    """How many times faster ``timing`` is than ``other``; None where either is missing.

    Examples
    --------
    >>> row = Row("quick", "float16", 1, 1, 1, 8, 8, 8)
    >>> ratio(Timing(row, "ours", 2e-3), Timing(row, "cuDNN", 3e-3))
    1.5
    """
    if timing is None or other is None or not timing.seconds or not other.seconds:
        return None
    return other.seconds / timing.seconds


def geometric_mean(values: Sequence[float]) -> float | None:
    """Of positive numbers; None of no numbers.

    Examples
    --------
    >>> round(geometric_mean([0.5, 2.0, 8.0]), 9), geometric_mean([])
    (2.0, None)
    """
    return math.exp(statistics.fmean(map(math.log, values))) if values else None
