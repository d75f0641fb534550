# SPDX-License-Identifier: MIT
"""A workbench for the tests of bench: candidates whose speed is known."""

import contextlib

from cupyflash import _bench
from cupyflash._bench import Candidate, Report
from cupyflash._bench_grids import BANDWIDTH, HOST, rows_of

# TFLOP/s (or, as they come, TB/s and calls in 10 us).
SPEEDS = {"ours": 600.0, "cuDNN": 500.0, "FlashAttention-2": 300.0, "CuPy": 10.0}


class FakeWorkbench:
    """``fails`` maps the name of a candidate to the step in which it fails."""

    def __init__(self, fails=None, interrupted_row=None):
        self.fails, self.interrupted_row = fails or {}, interrupted_row
        self.samples = []
        self._name = ""

    def machine(self):
        return {"GPU": "NVIDIA H200", "compute capability": "9.0", "driver": "580.159"}

    def matmul(self, dtype):
        return 700.0

    @contextlib.contextmanager
    def row(self, row):
        if row == self.interrupted_row:
            raise KeyboardInterrupt
        names = list(SPEEDS) + (["plain call"] if row.option else [])
        yield [
            Candidate(
                name,
                lambda i, name=name: self._step(name, "call") or name,
                kernel="forward_sm90" if name in ("ours", "plain call") else "",
                tile=(128, 128) if name in ("ours", "plain call") else None,
            )
            for name in names
        ]

    def _step(self, name, step):
        self._name = name
        if self.fails.get(name) == step:
            raise RuntimeError(f"no kernel\n({step})")

    def finish(self):
        self._step(self._name, "finish")

    def timer(self, row, candidate):
        name = candidate.name
        self._step(name, "timer")
        speed = SPEEDS.get(name, 650.0)
        seconds = row.flops / speed * 1e-12
        if row.unit == BANDWIDTH:
            seconds = row.kv_bytes / (speed / 150) * 1e-12
        elif row.unit == HOST:
            seconds = 6e-3 / speed
        counts = {"estimates": 0, "samples": 0}

        def sample(first, calls):
            if counts["estimates"] < (1 if seconds >= _bench._SLOW_SECONDS else 2):
                counts["estimates"] += 1
                self.samples.append((name, 0))
                return seconds
            self._step(name, "later")
            counts["samples"] += 1
            self.samples.append((name, counts["samples"]))
            return seconds * (1 + 0.1 * (counts["samples"] - 1))

        return sample

    def error(self, row, output):
        self._step(output, "error")
        return {"ours": 2e-3}.get(output, 2.5e-3)


def fake_report(*grids, fails=None):
    """Five samples of everything."""
    report = Report()
    rows = rows_of(grids)
    _bench.run(FakeWorkbench(fails), rows, report, rounds=5, seconds=1e9)
    return report
