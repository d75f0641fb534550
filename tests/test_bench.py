# SPDX-License-Identifier: MIT
"""bench without a GPU: its grids, its samples, its arithmetic, its reference in float64."""

import contextlib
import math

import pytest
from bench_fakes import SPEEDS, FakeWorkbench, fake_report

from cupyflash import _bench, _bench_grids, _bench_report
from cupyflash._bench import Candidate, Report, Timing
from cupyflash._bench_grids import BANDWIDTH, FLOPS, GRIDS, HOST, OPTIONS, Row, keep, rows_of
from cupyflash.reference import visible


class TestGrids:
    def test_paper_has_one_size_of_work(self):
        rows = rows_of(["paper"])
        assert len(rows) == 36
        for row in rows:
            assert row.batch * row.seqlen_q == 16_384
            assert row.heads_q * row.head_dim == 2_048
            assert row.heads_k == row.heads_q
            assert row.dtype == "bfloat16"
            n = row.seqlen_q
            assert row.flops == 4 * n * n * 2_048 * row.batch / (2 if row.causal else 1)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_full_precision(self, dtype):
        shapes = [(r.batch, r.seqlen_q, r.heads_q, r.head_dim) for r in rows_of([dtype])]
        assert shapes == [(4, 4096, 16, 64), (4, 4096, 16, 128), (1, 16384, 16, 64)]
        assert {row.dtype for row in rows_of([dtype])} == {dtype}

    def test_decode_is_rotated_past_the_l2(self):
        rows, l2 = rows_of(["decode"]), 60 << 20
        assert {(row.seqlen_q, row.unit) for row in rows} == {(1, BANDWIDTH)}
        assert rows[0].kv_bytes == 2 * 8 * 8192 * 128 * 2
        sets = [_bench_grids.rotations(row, l2) for row in rows]
        assert all(n * row.kv_bytes >= 3 * l2 for n, row in zip(sets, rows, strict=True))
        assert sets[0] > 1
        assert sets[2] == 1
        assert {_bench_grids.rotations(row, l2) for row in rows_of(["paper"])} == {1}

    def test_options_are_all_there(self):
        rows = rows_of(["options"])
        assert {(row.head_dim, row.option) for row in rows} == {
            (d, option) for d in (64, 128) for option in OPTIONS
        }
        shapes = {row.option: row.extra_shape for row in rows if row.head_dim == 64}
        assert shapes["bias over batch"] == shapes["mask over batch"] == (1, 32, 4096, 4096)
        assert shapes["bias over heads"] == shapes["mask over heads"] == (4, 1, 4096, 4096)
        assert shapes["alibi"] is None

    def test_dtype_in_place_of_the_grids_own(self):
        assert {row.dtype for row in rows_of(["paper", "decode"], "float16")} == {"float16"}
        with pytest.raises(ValueError, match="contradict"):
            rows_of(["float64"], "float16")
        with pytest.raises(ValueError, match="int8"):
            rows_of(["paper"], "int8")

    def test_names(self):
        with pytest.raises(ValueError, match="no grid 'papers'; expected paper, float32"):
            rows_of(["papers"])
        assert rows_of(["quick", "quick"]) == rows_of(["quick"])
        for name, grid in GRIDS.items():
            rows = rows_of([name])
            assert len({tuple(_bench_report.labels(row)) for row in rows}) == len(rows), name
            assert {row.unit for row in rows} <= {FLOPS, BANDWIDTH, HOST}
            assert {row.dtype for row in rows} == {grid.dtype}

    def test_keep(self):
        kept = keep(rows_of(["paper"]), ["head_dim=64,128", "causal=no", "seqlen=512"])
        assert [(row.head_dim, row.causal) for row in kept] == [(64, False), (128, False)]
        assert len(keep(rows_of(["options"]), ["option=bias"])) == 4
        for condition in ("head_dim", "dim=4", "=4"):
            with pytest.raises(ValueError, match="expected KEY=VALUE"):
                keep(rows_of(["paper"]), [condition])
        with pytest.raises(ValueError, match="no row is left by head_dim=63"):
            keep(rows_of(["paper"]), ["head_dim=63"])

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (1300, 1300), (700, 1500)])
    @pytest.mark.parametrize("tile", [(1, 1), (128, 96), (64, 64)])
    def test_tile_pairs_counts_the_tiles_that_a_window_touches(self, seqlen_q, seqlen_k, tile):
        row = Row("options", "float16", 1, 1, 1, seqlen_q, seqlen_k, 64, option="window")
        seen = visible(seqlen_q, seqlen_k, window=row.window)
        Br, Bc = tile
        count = sum(
            bool(seen[i : i + Br, j : j + Bc].any())
            for i in range(0, seqlen_q, Br)
            for j in range(0, seqlen_k, Bc)
        )
        assert row.tile_pairs(Br, Bc) == count * Br * Bc
        assert row.pairs == seen.sum()

    def test_best_is_known_for_all_rows_of_the_paper_on_hopper(self):
        factors = [_bench_grids.best_to_cudnn(row, "9.0") for row in rows_of(["paper"])]
        assert all(1 <= factor < 1.25 for factor in factors)
        row = keep(rows_of(["paper"]), ["head_dim=128", "causal=yes", "seqlen=4096"])[0]
        assert _bench_grids.best_to_cudnn(row, "9.0") == 554 / 506
        assert _bench_grids.best_to_cudnn(row, "10.0") is None
        assert _bench_grids.best_to_cudnn(rows_of(["paper"], "float16")[0], "9.0") is None
        assert _bench_grids.best_to_cudnn(rows_of(["quick"])[0], "9.0") is None


class TestMeasuring:
    def test_median_of_interleaved_samples(self):
        bench, report, shown = FakeWorkbench(), Report(), []
        rows = rows_of(["quick"])
        _bench.run(
            bench, rows, report, rounds=5, seconds=60, progress=lambda *done: shown.append(done)
        )
        assert shown == [(n, len(rows)) for n in range(1, len(rows) + 1)]
        assert report.machine == bench.machine()
        assert report.matmul == {"bfloat16": 700.0}
        assert [t.row for t in report.timings][:: len(SPEEDS)] == rows
        timing = report.timings[0]
        assert timing.candidate == "ours"
        assert timing.samples == 5
        # The fake's samples are 1.0, 1.1, ... times its speed.
        assert timing.seconds == pytest.approx(1.2 * rows[0].flops / SPEEDS["ours"] * 1e-12)
        assert timing.spread == pytest.approx(0.4 / 1.2)
        assert timing.error == 2e-3
        turns = [name for name, samples in bench.samples if samples]
        assert turns[: len(SPEEDS)] == list(SPEEDS)
        assert turns[len(SPEEDS) : 2 * len(SPEEDS)] == list(SPEEDS)

    def test_slow_candidates_give_fewer_samples(self):
        plans = _bench.sampling({"a": 1e-4, "b": 0.2, "c": 30.0}, rounds=9, seconds=3.0)
        assert plans["a"] == (9, 30)
        assert plans["b"] == (5, 1)
        assert plans["c"] == (1, 1)
        assert _bench.sampling({"a": 0.0}, rounds=2, seconds=1.0) == {"a": (2, 50)}

    def test_no_time_left_still_gives_a_number(self):
        report = Report()
        _bench.run(FakeWorkbench(), rows_of(["paper"])[:2], report, rounds=7, seconds=1e-9)
        assert {1, 3} <= {t.samples for t in report.timings} <= {1, 2, 3, 4}
        assert all(t.seconds for t in report.timings)

    @pytest.mark.parametrize("when", ["call", "finish", "timer", "later"])
    def test_failing_candidate_is_a_reason(self, when):
        report = Report()
        bench = FakeWorkbench(fails={"cuDNN": when})
        _bench.run(bench, rows_of(["quick"])[:2], report, rounds=3, seconds=9)
        for timing in report.timings:
            if timing.candidate == "cuDNN":
                assert timing.seconds is None
                assert timing.reason == f"no kernel ({when})"
            else:
                assert timing.seconds
                assert not timing.reason

    def test_failing_error_leaves_the_time(self):
        report = Report()
        bench = FakeWorkbench(fails={"cuDNN": "error"})
        _bench.run(bench, rows_of(["quick"])[:1], report, rounds=3, seconds=9)
        (timing,) = (t for t in report.timings if t.candidate == "cuDNN")
        assert timing.seconds
        assert timing.error is None
        assert timing.reason == "no error: no kernel (error)"

    def test_row_that_does_not_fit_the_memory(self):
        class Full(FakeWorkbench):
            @contextlib.contextmanager
            def row(self, row):
                if row.head_dim == 64:
                    raise MemoryError("Out of memory allocating 1 byte")
                with super().row(row) as candidates:
                    yield candidates

        report = Report()
        _bench.run(Full(), rows_of(["quick"]), report, rounds=3, seconds=9)
        lost = [t for t in report.timings if t.row.head_dim == 64]
        assert {(t.candidate, t.seconds, t.reason) for t in lost} == {
            ("ours", None, "out of memory")
        }
        assert all(t.seconds for t in report.timings if t.row.head_dim == 128)

    def test_interrupt_keeps_what_was_measured(self):
        report, rows = Report(), rows_of(["quick"])
        with pytest.raises(KeyboardInterrupt):
            _bench.run(FakeWorkbench(interrupted_row=rows[2]), rows, report, rounds=3, seconds=9)
        assert list(dict.fromkeys(t.row for t in report.timings)) == rows[:2]

    def test_long_failures_are_cut(self):
        assert len(_bench.failure(RuntimeError("x" * 1000))) == 200
        assert _bench.failure(RuntimeError("CUDA out of memory. Tried ...")) == "out of memory"


class TestArithmetic:
    row = rows_of(["paper"])[0]

    def test_ratio(self):
        ours, cudnn = Timing(self.row, "ours", 2e-3), Timing(self.row, "cuDNN", 3e-3)
        assert _bench.ratio(ours, cudnn) == 1.5
        assert _bench.ratio(ours, None) is None
        assert _bench.ratio(ours, Timing(self.row, "cuDNN", reason="none")) is None

    def test_geometric_mean(self):
        assert _bench.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
        assert _bench.geometric_mean([3.0]) == pytest.approx(3.0)
        assert _bench.geometric_mean([]) is None

    def test_rates(self):
        (decode, *_), (small, *_) = rows_of(["decode"]), rows_of(["small"])
        assert self.row.rate(1e-3) == pytest.approx(4 * 512**2 * 64 * 32 * 32 / 1e9)
        assert decode.rate(22e-6) == pytest.approx(1.525, abs=1e-3)
        assert small.rate(15e-6) == pytest.approx(15)

    def test_best_is_the_known_ratio_times_this_runs_cudnn(self):
        report = fake_report("paper")
        row = keep(rows_of(["paper"]), ["head_dim=64", "causal=no", "seqlen=16384"])[0]
        (section,) = _bench_report.sections(report)
        found = section.rows[row]
        assert _bench_report.best(row, found, report) == pytest.approx(
            SPEEDS["cuDNN"] / 1.2 * 532 / 446
        )
        assert _bench_report.best_ratio(row, found, report) == pytest.approx(
            SPEEDS["ours"] / SPEEDS["cuDNN"] * 446 / 532
        )
        report.machine["compute capability"] = "8.0"
        assert _bench_report.best(row, found, report) is None

    def test_overhead(self):
        rows = {row.option: row for row in rows_of(["options"]) if row.head_dim == 64}
        bias, window = rows["bias over batch"], rows["window"]
        plain = Timing(bias, "plain call", 1e-3, tile=(128, 128))
        assert _bench_report.overhead(Timing(bias, "ours", 1.2e-3), plain) == pytest.approx(0.2)
        assert _bench_report.overhead(Timing(bias, "ours"), plain) is None
        visible_part = window.tile_pairs(128, 64) / 4096**2
        timing = Timing(window, "ours", 1.1e-3 * visible_part, tile=(128, 64))
        assert _bench_report.overhead(timing, plain) == pytest.approx(0.1)


def test_candidate_without_a_call_is_only_a_reason():
    class Refusing(FakeWorkbench):
        @contextlib.contextmanager
        def row(self, row):
            yield [Candidate("ours", reason="takes float16", kernel="forward_sm90")]

    report = Report()
    _bench.run(Refusing(), rows_of(["quick"])[:1], report, rounds=3, seconds=9)
    (timing,) = report.timings
    assert (timing.seconds, timing.reason, timing.kernel) == (None, "takes float16", "forward_sm90")
    assert math.isclose(report.matmul["bfloat16"], 700)
