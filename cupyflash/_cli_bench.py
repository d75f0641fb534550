# SPDX-License-Identifier: MIT
"""python -m cupyflash bench: our kernels beside the fastest others, on one GPU in one run."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from cupyflash import _bench, _bench_plot, _bench_report, _dtypes
from cupyflash._bench_grids import GRIDS, Row, keep, rows_of
from cupyflash._cli_common import CommandError, Progress, check_target, write_files
from cupyflash._gpu import gpu_obstacle
from cupyflash._messages import one_line
from cupyflash.plan import KERNELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "grids:\n" + "\n".join(
        f"  {name:<9} {grid.text}, {grid.dtype}" for name, grid in GRIDS.items()
    )
    what = parser.add_argument_group("what to time")
    what.add_argument(
        "--grid",
        nargs="+",
        metavar="NAME",
        default=["quick"],
        help="one or more of the grids below (default: quick)",
    )
    what.add_argument(
        "--dtype", metavar="NAME", help=f"{_dtypes.NAMES_TEXT} (default: the grid's own)"
    )
    what.add_argument(
        "--rows",
        nargs="+",
        metavar="KEY=V[,V]",
        default=[],
        help="only these rows, as in: head_dim=64 causal=no seqlen=512,4096",
    )
    what.add_argument(
        "--kernel",
        nargs="+",
        metavar="NAME",
        default=[],
        help="which of our kernels; the first is 'ours' in the tables (default: the plan's choice)",
    )
    what.add_argument(
        "--against",
        nargs="*",
        metavar="NAME",
        help=f"peers: {', '.join(_bench.PEERS)}; those of torch where it is installed, and none "
        "after --against alone (default: all)",
    )
    how = parser.add_argument_group("how long")
    how.add_argument(
        "--rounds",
        type=int,
        default=7,
        metavar="N",
        help="samples of each candidate, taken in turns; the median counts (default: %(default)s)",
    )
    how.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="take fewer samples, at least 1, to stay within this time (default: %(default)g)",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--csv", metavar="FILE", help="write every timing")
    files.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the tables; in a page that has such tables between their marks, replace them",
    )
    files.add_argument("--plot", metavar="FILE.svg", help="draw the rates as bars")
    files.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="measure nothing: render what an earlier run wrote by --csv",
    )


def command(args: argparse.Namespace) -> None:
    """Measure, or read, and render.

    Raises
    ------
    CommandError
        An option makes no sense, there is no GPU, or a file can't be read or written.
    KeyboardInterrupt
        After what had been measured until then was rendered.
    """
    _check_files(args)
    if args.source is not None:
        _render(args, _read(args.source))
        return
    rows, kernels, peers = _check(args)
    obstacle = gpu_obstacle()
    if obstacle is not None:
        raise CommandError(f"this needs a GPU: {obstacle}")
    report = _bench.Report()
    progress = Progress(sys.stderr)
    try:
        with open_workbench(kernels, peers) as bench:
            _bench.run(
                bench, rows, report, rounds=args.rounds, seconds=args.seconds, progress=progress
            )
    except BaseException as error:  # Ctrl-C, or a driver that has broken down: nothing is lost
        progress.close()
        if report.timings:
            _render(args, report)
        if isinstance(error, (CommandError, KeyboardInterrupt)):
            raise
        raise CommandError(f"the GPU failed: {one_line(error)}") from error
    _render(args, report)


def open_workbench(
    kernels: Sequence[str | None], peers: Sequence[str]
) -> contextlib.AbstractContextManager[_bench.Workbench]:
    """The workbench of this machine's GPU."""
    from cupyflash._bench_gpu import GpuWorkbench

    return GpuWorkbench(kernels, peers).open()


def _check(args: argparse.Namespace) -> tuple[list[Row], list[str | None], list[str]]:
    try:
        rows = keep(rows_of(_names(args.grid), args.dtype), args.rows)
    except ValueError as error:
        raise CommandError(one_line(error)) from error
    kernels = _names(args.kernel)
    known = [name for name in KERNELS if name != "host"]
    peers = list(_bench.PEERS) if args.against is None else _names(args.against)
    for option, names, choices in (
        ("--kernel", kernels, known),
        ("--against", peers, list(_bench.PEERS)),
    ):
        for name in names:
            if name not in choices:
                raise CommandError(f"{option} {name}: expected one of {', '.join(choices)}")
    if args.rounds < 1:
        raise CommandError(f"--rounds is {args.rounds}; expected 1 or more")
    if not (args.seconds > 0 and math.isfinite(args.seconds)):
        raise CommandError(f"--seconds is {args.seconds}; expected a positive number")
    return (
        rows,
        [*kernels] or [None],
        [text for name, text in _bench.PEERS.items() if name in peers],
    )


def _names(given: Sequence[str]) -> list[str]:
    """Names apart from each other by spaces or commas, each once."""
    names = (name.strip() for text in given for name in text.split(","))
    return list(dict.fromkeys(name for name in names if name))


def _check_files(args: argparse.Namespace) -> None:
    targets: dict[str, str] = {}
    for option in ("csv", "markdown", "plot"):
        path = getattr(args, option)
        if path is None:
            continue
        check_target(f"--{option}", path)
        other = targets.setdefault(os.path.realpath(path), option)
        if other != option:
            raise CommandError(f"--{other} and --{option} are both {path}; expected two files")
    if args.markdown is not None and not _bench_report.takes(_page(args.markdown)):
        raise CommandError(
            f"--markdown {args.markdown}: the file has other text; put the lines "
            f"{' and '.join(map(repr, _bench_report.MARKS))} where the tables are to stand"
        )
    if args.plot is not None and not args.plot.lower().endswith(".svg"):
        raise CommandError(f"--plot {args.plot}: plots are SVG; expected a name ending in .svg")


def _read(path: str) -> _bench.Report:
    try:
        with open(path, encoding="utf-8") as stream:
            return _bench_report.from_csv(stream.read())
    except OSError as error:
        raise CommandError(f"--from {path}: {error.strerror or one_line(error)}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CommandError(f"--from {path}: {one_line(error)}") from error


def _render(args: argparse.Namespace, report: _bench.Report) -> None:
    writers: dict[str, Callable[[BinaryIO], Any]] = {}

    def add(path: str | None, text: str) -> None:
        if path is not None:
            writers[path] = lambda stream: stream.write(text.encode())

    add(args.csv, _bench_report.to_csv(report))
    add(args.markdown, _bench_report.replaced(_page(args.markdown), _bench_report.markdown(report)))
    add(args.plot, _bench_plot.plot(report))
    write_files(writers)  # before the terminal is written to, which may fail
    print(_bench_report.text(report), end="")
    for path in writers:
        print(f"written: {path}")


def _page(path: str | None) -> str:
    """What is in the Markdown file now; empty if there is none."""
    try:
        with open(path or os.devnull, encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise CommandError(f"--markdown {path}: {one_line(error)}") from error
