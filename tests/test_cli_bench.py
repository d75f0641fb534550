# SPDX-License-Identifier: MIT
"""The command bench: what it prints and writes, from measurements that are made up."""

import contextlib
import csv
import dataclasses
import io
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from bench_fakes import SPEEDS, FakeWorkbench, fake_report
from command_line import refused, shell

from cupyflash import _bench, _bench_plot, _bench_report, _cli_bench
from cupyflash.__main__ import main
from cupyflash._bench import Report, Timing
from cupyflash._bench_grids import rows_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fake(monkeypatch):
    """Let the command measure with a fake workbench; its attributes can be set."""
    bench = FakeWorkbench()
    bench.asked = None

    def open_workbench(kernels, peers):
        bench.asked = (kernels, peers)
        return contextlib.nullcontext(bench)

    monkeypatch.setattr(_cli_bench, "gpu_obstacle", lambda: None)
    monkeypatch.setattr(_cli_bench, "open_workbench", open_workbench)
    return bench


FILES = ("--csv", "b.csv", "--markdown", "b.md", "--plot", "b.svg")


class TestCommand:
    def test_prints_and_writes(self, fake, folder, capsys):
        assert main(["bench", "--grid", "quick", *FILES]) == 0
        out, err = capsys.readouterr()
        assert "100 %" in err
        for text in ("NVIDIA H200", "580.159", "quick: ", "ours over cuDNN: geometric mean 1.200"):
            assert text in out
        assert sorted(os.listdir()) == ["b.csv", "b.md", "b.svg"]
        assert "written: b.csv" in out
        assert fake.asked == (
            [None],
            [
                "cuDNN",
                "FlashAttention-2",
                "mem.-efficient",
                "torch unfused",
                "torch's choice",
                "CuPy",
            ],
        )

    def test_several_grids_and_a_filter(self, fake, capsys):
        argv = "bench --grid quick,decode small --rows head_dim=128 --rounds 2 --dtype float16"
        assert main(argv.split()) == 0
        out = capsys.readouterr().out
        assert "quick: " in out
        assert "decode: " in out
        assert "small: " not in out
        assert "float16" in out

    def test_kernels_and_peers(self, fake, capsys):
        argv = "bench --kernel forward_sm90 fa1_forward --against cupy,cudnn"
        assert main(argv.split()) == 0
        assert fake.asked == (["forward_sm90", "fa1_forward"], ["cuDNN", "CuPy"])
        assert main(["bench", "--against"]) == 0
        assert fake.asked == ([None], [])

    def test_interrupted_run_writes_what_it_has(self, fake, folder, capsys):
        fake.interrupted_row = rows_of(["quick"])[1]
        assert main(["bench", *FILES]) == 130
        out, err = capsys.readouterr()
        assert err.splitlines()[-1] == "cupyflash bench: interrupted"
        assert len(_bench_report.from_csv(Path("b.csv").read_text()).timings) == len(SPEEDS)
        assert out.count("forward_sm90") == 1
        assert sorted(os.listdir()) == ["b.csv", "b.md", "b.svg"]

    def test_interrupted_before_the_first_row(self, fake, folder, capsys):
        fake.interrupted_row = rows_of(["quick"])[0]
        assert main(["bench", *FILES]) == 130
        assert os.listdir() == []

    def test_broken_driver_loses_nothing(self, fake, folder, monkeypatch, capsys):
        @contextlib.contextmanager
        def breaking(kernels, peers):
            yield fake
            raise RuntimeError("cudaErrorIllegalAddress")

        monkeypatch.setattr(_cli_bench, "open_workbench", breaking)
        assert main(["bench", *FILES]) == 2
        out, err = capsys.readouterr()
        assert err.splitlines()[-1] == "cupyflash bench: the GPU failed: cudaErrorIllegalAddress"
        assert "ours over cuDNN" in out
        assert sorted(os.listdir()) == ["b.csv", "b.md", "b.svg"]

    def test_failing_candidate_has_a_footnote(self, fake, capsys):
        fake.fails = {"cuDNN": "call"}
        assert main(["bench"]) == 0
        out = capsys.readouterr().out
        assert "[1] cuDNN: no kernel (call)" in out
        assert out.count("- [1]") == 4
        assert "ours over cuDNN" not in out
        assert "ours over FlashAttention-2: geometric mean 2.000 of 4 rows" in out

    def test_renders_an_earlier_run_without_a_gpu(self, folder, capsys):
        report = fake_report("quick", "decode")
        Path("old.csv").write_text(_bench_report.to_csv(report))
        assert main(["bench", "--from", "old.csv", *FILES]) == 0
        assert capsys.readouterr().out.startswith(_bench_report.text(report))
        assert Path("b.csv").read_text() == Path("old.csv").read_text()
        assert Path("b.md").read_text() == _bench_report.markdown(report)
        assert Path("b.svg").read_text() == _bench_plot.plot(report)

    def test_markdown_goes_between_the_marks_of_a_page(self, folder, capsys):
        report = fake_report("quick")
        Path("old.csv").write_text(_bench_report.to_csv(report))
        opening, closing = _bench_report.MARKS
        Path("b.md").write_text(f"# Speed\n\n{opening}\nold\n{closing}\n\nWhy so fast.\n")
        assert main(["bench", "--from", "old.csv", "--markdown", "b.md"]) == 0
        page = Path("b.md").read_text()
        assert page == f"# Speed\n\n{_bench_report.markdown(report)}\nWhy so fast.\n"
        assert main(["bench", "--from", "old.csv", "--markdown", "b.md"]) == 0
        assert Path("b.md").read_text() == page

    def test_a_page_without_the_marks_is_not_overwritten(self, folder, capsys):
        Path("old.csv").write_text(_bench_report.to_csv(fake_report("quick")))
        for page in ("# Speed\n", f"# Speed\n{_bench_report.MARKS[0]}\n"):
            Path("b.md").write_text(page)
            assert main(["bench", "--from", "old.csv", "--markdown", "b.md"]) == 2
            assert "--markdown b.md: the file has other text" in capsys.readouterr().err
            assert Path("b.md").read_text() == page

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--grid papers", "there is no grid 'papers'"),
            ("--dtype int8", "dtype is 'int8'"),
            ("--grid float64 --dtype float16", "contradict"),
            ("--rows head_dim", "expected KEY=VALUE"),
            ("--rows head_dim=63", "no row is left"),
            ("--kernel fa3", "--kernel fa3: expected one of fa1_forward, forward_simt"),
            ("--kernel host", "--kernel host"),
            ("--against fa3", "--against fa3: expected one of cudnn, fa2"),
            ("--rounds 0", "--rounds is 0"),
            ("--seconds nan", "--seconds is nan"),
            ("--csv nowhere/b.csv", "there is no folder"),
            ("--plot b.png", "--plot b.png: plots are SVG"),
            ("--csv b --markdown b", "--csv and --markdown are both b"),
            ("--from nothing.csv", "--from nothing.csv: No such file"),
        ],
    )
    def test_refusals(self, argv, message, fake, folder, capsys):
        assert message in refused(capsys, "bench", *argv.split())
        assert fake.asked is None
        assert os.listdir() == []

    def test_needs_a_gpu(self, monkeypatch, capsys):
        monkeypatch.setattr(_cli_bench, "gpu_obstacle", lambda: "CuPy sees no GPU")
        assert refused(capsys, "bench").endswith("this needs a GPU: CuPy sees no GPU")

    @pytest.mark.gpu
    def test_on_a_gpu(self, folder, capsys):
        argv = ["bench", "--grid", "quick", "--rounds", "2", "--seconds", "5", *FILES]
        assert main([*argv, "--rows", "head_dim=64"]) == 0
        report = _bench_report.from_csv(Path("b.csv").read_text())
        ours = [t for t in report.timings if t.candidate == "ours"]
        assert len(ours) == 2
        for timing in ours:
            assert timing.seconds, timing.reason
            assert timing.error < 1e-2, timing.reason
        assert "driver" in report.machine

    @pytest.mark.gpu
    def test_every_kind_of_row_on_a_gpu(self, folder, capsys):
        argv = ["bench", "--grid", "small", "decode", "options", "--rounds", "1", "--seconds", "5"]
        argv += ["--rows", "seqlen=128,8192,4096", "batch=1,4"]
        assert main([*argv, "--against", "--csv", "b.csv"]) == 0
        for timing in _bench_report.from_csv(Path("b.csv").read_text()).timings:
            assert timing.seconds, timing
            if timing.candidate != _bench.PLAIN:
                assert timing.error < 1e-2, timing

    def test_in_a_shell(self, folder):
        Path("old.csv").write_text(_bench_report.to_csv(fake_report("quick")))
        result = shell("bench", "--from", "old.csv")
        assert result.returncode == 0
        assert result.stderr == ""
        assert "ours over cuDNN" in result.stdout


class TestTables:
    def test_columns_and_cells(self):
        report = fake_report("paper")
        (section,) = _bench_report.sections(report)
        table = _bench_report.speed_table(section, report)
        assert table.header == [
            *("head_dim", "causal", "seqlen", "kernel", "us", "ours", "of matmul"),
            *("cuDNN", "FlashAttention-2", "CuPy", "best"),
        ]
        # The fake's medians are 1.2 times its speed.
        assert table.rows[5] == [
            *("64", "no", "16,384", "forward_sm90", "4,398", "500", "71 %"),
            *("417 (1.20)", "250 (2.00)", "8.3 (60.00)", "497 (1.01)"),
        ]
        assert table.notes == []
        errors = _bench_report.error_table(section)
        assert errors.rows[0][3:5] == ["2.00e-03", "2.50e-03 (0.80)"]

    def test_units(self):
        report = fake_report("decode", "small")
        decode, small = (
            _bench_report.speed_table(section, report) for section in _bench_report.sections(report)
        )
        assert decode.rows[0][:7] == ["1", "32/8", "128", "8,192", "forward_sm90", "10.1", "3.33"]
        assert "of matmul" not in decode.header
        assert small.rows[0][:6] == ["1", "8/8", "128/128", "64", "forward_sm90", "12.0"]
        assert small.rows[0][6] == "14.4 (1.20)"  # us, and how many times faster ours is
        assert "us" not in small.header

    def test_options_have_their_overhead(self):
        report = fake_report("options")
        (section,) = _bench_report.sections(report)
        table = _bench_report.speed_table(section, report)
        place = table.header.index("overhead")
        assert table.rows[0][1] == "bias over batch"
        assert table.rows[0][place - 1 : place + 1] == ["542", "8 %"]

    def test_summary_names_the_least_row(self):
        row, other = rows_of(["quick"])[:2]
        report = Report(
            timings=[
                Timing(row, "ours", 1e-3),
                Timing(row, "cuDNN", 2e-3),
                Timing(other, "ours", 4e-3),
                Timing(other, "cuDNN", 2e-3),
                Timing(other, "CuPy", 8e-3),
            ]
        )
        (section,) = _bench_report.sections(report)
        assert _bench_report.summary(section, report) == [
            "ours over cuDNN: geometric mean 1.000 of 2 rows, least 0.500 (batch 2, heads 8, "
            "head_dim 64, causal yes, seqlen 1,024)",
            "ours over CuPy: geometric mean 2.000 of 1 row, least 2.000 (batch 2, heads 8, "
            "head_dim 64, causal yes, seqlen 1,024)",
        ]

    def test_other_kernels_stand_before_the_peers(self):
        row = rows_of(["quick"])[0]
        timings = [Timing(row, name, 1e-3) for name in ("ours", "fa1_forward", "CuPy", "cuDNN")]
        (section,) = _bench_report.sections(Report(timings=timings))
        assert section.others == ["fa1_forward", "cuDNN", "CuPy"]

    def test_row_without_any_time(self):
        row = rows_of(["quick"])[0]
        report = Report(timings=[Timing(row, "ours", reason="out of memory")])
        text = _bench_report.text(report)
        assert "[1] ours: out of memory" in text
        assert "error relative" not in text
        ET.fromstring(_bench_plot.plot(report))

    def test_same_report_same_files(self):
        first, second = fake_report("paper", "decode"), fake_report("paper", "decode")
        for render in (
            _bench_report.text,
            _bench_report.markdown,
            _bench_report.to_csv,
            _bench_plot.plot,
        ):
            assert render(first) == render(second)

    def test_markdown_tables_are_well_formed(self):
        report = fake_report("paper", "options", fails={"CuPy": "call"})
        report.timings[0] = dataclasses.replace(report.timings[0], reason="a | b < c")
        text = _bench_report.markdown(report)
        assert r"a \| b &lt; c" in text
        for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(counts) == 1
        assert text.count("ours over best") == 1


class TestCsv:
    def test_nothing_is_lost(self):
        report = fake_report("paper", "decode", "options", "small", fails={"CuPy": "error"})
        again = _bench_report.from_csv(_bench_report.to_csv(report))
        assert again == report

    def test_is_a_plain_table_with_rates(self):
        written = _bench_report.to_csv(fake_report("quick"))
        lines = [line for line in written.splitlines() if not line.startswith("#")]
        for line in csv.DictReader(lines):
            assert float(line["rate"]) == pytest.approx(SPEEDS[line["candidate"]] / 1.2)

    @pytest.mark.parametrize(
        ("column", "value"),
        [("seqlen_k", "0"), ("head_dim", "-64"), ("seconds", "0"), ("seconds", "nan")],
    )
    def test_numbers_that_no_run_has(self, column, value, tmp_path, capsys):
        head, names, line, *_ = re.split(
            r"^(grid,.*\n)(.*\n)", _bench_report.to_csv(fake_report("paper")), flags=re.M
        )
        cells = dict(zip(names.strip().split(","), line.split(","), strict=False))
        at = list(cells).index(column)
        changed = [*line.split(",")]
        changed[at] = value
        path = tmp_path / "b.csv"
        path.write_text(head + names + ",".join(changed))
        assert f"a line has {column} {value}; expected" in refused(
            capsys, "bench", "--from", str(path)
        )

    def test_sizes_of_which_no_best_peer_is_known(self, tmp_path):
        written = _bench_report.to_csv(fake_report("paper"))
        path = tmp_path / "b.csv"
        path.write_text(re.sub(r"(paper,bfloat16,\d+,\d+,\d+,\d+,\d+),\d+,", r"\1,80,", written))
        assert main(["bench", "--from", str(path)]) == 0

    @pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00"])
    def test_other_files(self, text, tmp_path, capsys):
        (tmp_path / "x.csv").write_text(text)
        message = refused(capsys, "bench", "--from", str(tmp_path / "x.csv"))
        assert "no file that bench --csv wrote" in message

    def test_cut_short(self, tmp_path, capsys):
        written = _bench_report.to_csv(fake_report("quick"))
        (tmp_path / "x.csv").write_text(written[:-40])
        assert "cut short" in refused(capsys, "bench", "--from", str(tmp_path / "x.csv"))


class TestPlot:
    @pytest.fixture
    def svg(self):
        return ET.parse(
            io.StringIO(_bench_plot.plot(fake_report("paper", "decode", "options", "small")))
        )

    def test_has_a_bar_for_each_time(self, svg):
        bars = [e for e in svg.iter() if e.tag.endswith("rect") and len(e)]
        timings = fake_report("paper", "decode", "options", "small").timings
        assert len(bars) == len(timings)
        for bar in bars:
            assert float(bar.get("height")) >= 0
            assert 0 <= float(bar.get("x")) < _bench_plot._WIDTH

    def test_bars_are_as_high_as_their_rates(self, svg):
        heights = {}
        for bar in svg.iter():
            if bar.tag.endswith("rect") and len(bar):
                heights.setdefault(bar[0].text.split(":")[0], []).append(float(bar.get("height")))
        assert heights["ours"][0] / heights["cuDNN"][0] == pytest.approx(1.2, rel=2e-2)

    def test_has_a_panel_for_each_head_dim_and_mask(self, svg):
        texts = [e.text for e in svg.iter() if e.tag.endswith("text")]
        assert "bfloat16, head_dim 128, causal, TFLOP/s" in texts
        assert "decode, bfloat16, TB/s" in texts
        assert "small, bfloat16, us (less is better)" in texts
        assert len([t for t in texts if t and "head_dim" in t]) == 6
        dashed = [e for e in svg.iter() if e.get("stroke-dasharray")]
        assert len(dashed) == 36  # the best peer on each row of the paper's grid
