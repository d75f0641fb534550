# SPDX-License-Identifier: MIT
"""What ``bench`` prints and writes: tables, Markdown and CSV, all of them from a Report alone."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Sequence

from cupyflash import _bench
from cupyflash._bench import OURS, PLAIN, Report, Timing, geometric_mean, ratio
from cupyflash._bench_grids import BANDWIDTH, FLOPS, GRIDS, HOST, Row, best_to_cudnn

MARKS = ("<!-- measured: python -m cupyflash bench -->", "<!-- end of measurements -->")
_HEADINGS = {
    "batch": "batch",
    "heads": "heads q/k",
    "heads_q": "heads",
    "seqlen": "seqlen q/k",
    "seqlen_k": "seqlen",
    "head_dim": "head_dim",
    "causal": "causal",
    "option": "with",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as text; ``notes`` are the footnotes that cells refer to by number."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Section:
    """One grid in one dtype: timings by row, and by the name of the candidate."""

    grid: str
    dtype: str
    rows: dict[Row, dict[str, Timing]]

    @property
    def unit(self) -> str:
        """Of the grid's rates."""
        return next(iter(self.rows)).unit

    @property
    def title(self) -> str:
        """What is measured, in what unit."""
        return f"{self.grid}: {GRIDS[self.grid].text}, {self.dtype}, {self.unit}"

    @property
    def others(self) -> list[str]:
        """The candidates beside ours and the plain call, ours by other names first."""
        names = dict.fromkeys(name for found in self.rows.values() for name in found)
        peers = list(_bench.PEERS.values())
        kernels = [name for name in names if name not in (OURS, PLAIN, *peers)]
        return kernels + [name for name in peers if name in names]


def sections(report: Report) -> list[Section]:
    """The timings by grid and dtype, in the order in which they were measured."""
    found: dict[tuple[str, str], Section] = {}
    for timing in report.timings:
        row = timing.row
        section = found.setdefault((row.grid, row.dtype), Section(row.grid, row.dtype, {}))
        section.rows.setdefault(row, {})[timing.candidate] = timing
    return list(found.values())


def labels(row: Row) -> list[str]:
    """What tells a row from the others of its grid."""
    texts = {
        "heads": f"{row.heads_q}/{row.heads_k}",
        "seqlen": f"{row.seqlen_q:,}/{row.seqlen_k:,}",
        "seqlen_k": f"{row.seqlen_k:,}",
        "causal": "yes" if row.causal else "no",
    }
    return [texts.get(name) or str(getattr(row, name)) for name in GRIDS[row.grid].columns]


def speed_table(section: Section, report: Report) -> Table:
    """Rates of every candidate; in brackets, how many times faster ours is."""
    notes = _Notes()
    columns: list[tuple[str, Callable[[Row, dict[str, Timing]], str]]] = [
        ("kernel", lambda row, found: _kernel(found)),
        (OURS, lambda row, found: notes.cell(found.get(OURS), _rate)),
    ]
    if section.unit != HOST:
        columns.insert(1, ("us", lambda row, found: _microseconds(found.get(OURS))))
    if section.unit == FLOPS and (peak := report.matmul.get(section.dtype)):
        columns.append(("of matmul", lambda row, found: _percent(_divided(found, peak))))
    if section.grid == "options":
        columns.append((PLAIN, lambda row, found: notes.cell(found.get(PLAIN), _rate)))
        columns.append(
            ("overhead", lambda row, found: _percent(overhead(found.get(OURS), found.get(PLAIN))))
        )
    for name in section.others:
        columns.append((name, lambda row, found, name=name: notes.compared(found, name, _rate)))
    if any(best(row, found, report) for row, found in section.rows.items()):
        columns.append(("best", lambda row, found: _best_cell(row, found, report)))
    return _table(section.title, section, columns, notes)


def error_table(section: Section) -> Table | None:
    """Errors of every candidate; in brackets, ours over it. None where there are none."""
    if not any(t.error is not None for found in section.rows.values() for t in found.values()):
        return None
    notes = _Notes()

    def of(timing: Timing | None) -> str:
        return "-" if timing is None or timing.error is None else f"{timing.error:.2e}"

    def compared(found: dict[str, Timing], name: str) -> str:
        ours, other = found.get(OURS), found.get(name)
        if ours is None or other is None or not ours.error or not other.error:
            return of(other)
        return f"{of(other)} ({ours.error / other.error:.2f})"

    columns: list[tuple[str, Callable[[Row, dict[str, Timing]], str]]] = [
        (OURS, lambda row, found: of(found.get(OURS)))
    ]
    for name in section.others:
        columns.append((name, lambda row, found, name=name: compared(found, name)))
    title = f"{section.grid}, {section.dtype}: error relative to float64"
    return _table(title, section, columns, notes)


def summary(section: Section, report: Report) -> list[str]:
    """Geometric means of ours over each other candidate, and the least of the ratios."""
    lines = []
    ratios = {
        name: {row: ratio(found.get(OURS), found.get(name)) for row, found in section.rows.items()}
        for name in section.others
    }
    ratios["best"] = {row: best_ratio(row, found, report) for row, found in section.rows.items()}
    for name, by_row in ratios.items():
        known = {row: value for row, value in by_row.items() if value is not None}
        if known:
            least = min(known, key=lambda row: known[row])
            rows = "1 row" if len(known) == 1 else f"{len(known)} rows"
            lines.append(
                f"ours over {name}: geometric mean {geometric_mean(list(known.values())):.3f} of "
                f"{rows}, least {known[least]:.3f} ({_described(least)})"
            )
    return lines


def best(row: Row, found: dict[str, Timing], report: Report) -> float | None:
    """TFLOP/s that the fastest known peer would reach: its ratio to cuDNN times cuDNN's rate."""
    cudnn = found.get(_bench.CUDNN)
    factor = best_to_cudnn(row, report.machine.get("compute capability", ""))
    return cudnn.rate * factor if factor and cudnn and cudnn.rate else None


def best_ratio(row: Row, found: dict[str, Timing], report: Report) -> float | None:
    """Ours over :func:`best`."""
    ours, reached = found.get(OURS), best(row, found, report)
    return ours.rate / reached if ours and ours.rate and reached else None


def overhead(timing: Timing | None, plain: Timing | None) -> float | None:
    """What an option costs over the plain call, as a part of it.

    A window leaves fewer tiles: its cost is that of a visible tile.
    """
    slower = ratio(plain, timing)
    if slower is None or timing is None or plain is None:
        return None
    if timing.row.option != "window":
        return slower - 1
    everything = dataclasses.replace(timing.row, option="")
    visible = timing.row.tile_pairs(*(timing.tile or (1, 1)))
    return slower * everything.tile_pairs(*(plain.tile or (1, 1))) / visible - 1


class _Notes:
    """Footnotes, each reason once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def cell(self, timing: Timing | None, text: Callable[[Timing], str]) -> str:
        """The text of a timing, or a dash with the number of the footnote that says why."""
        if timing is None:
            return "-"
        shown = "-" if timing.seconds is None else text(timing)
        if not timing.reason:
            return shown
        note = f"{timing.candidate}: {timing.reason}"
        if note not in self.texts:
            self.texts.append(note)
        return f"{shown} [{self.texts.index(note) + 1}]"

    def compared(self, found: dict[str, Timing], name: str, text: Callable[[Timing], str]) -> str:
        """As ``cell``, with ours over it in brackets."""
        value = ratio(found.get(OURS), found.get(name))
        return self.cell(
            found.get(name),
            lambda timing: text(timing) + ("" if value is None else f" ({value:.2f})"),
        )


def _table(
    title: str,
    section: Section,
    columns: list[tuple[str, Callable[[Row, dict[str, Timing]], str]]],
    notes: _Notes,
) -> Table:
    header = [_HEADINGS[name] for name in GRIDS[section.grid].columns]
    header += [name for name, _ in columns]
    rows = [
        labels(row) + [cell(row, found) for _, cell in columns]
        for row, found in section.rows.items()
    ]
    return Table(title, header, rows, notes.texts)


def _rate(timing: Timing) -> str:
    rate = timing.rate
    assert rate is not None
    if timing.row.unit == BANDWIDTH:
        return f"{rate:.2f}"
    return f"{rate:.0f}" if rate >= 100 and timing.row.unit != HOST else f"{rate:.1f}"


def _kernel(found: dict[str, Timing]) -> str:
    return (found[OURS].kernel if OURS in found else "") or "-"


def _microseconds(timing: Timing | None) -> str:
    if timing is None or timing.seconds is None:
        return "-"
    us = timing.seconds * 1e6
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _divided(found: dict[str, Timing], peak: float) -> float | None:
    rate = found[OURS].rate if OURS in found else None
    return None if rate is None else rate / peak


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f} %"


def _best_cell(row: Row, found: dict[str, Timing], report: Report) -> str:
    reached, value = best(row, found, report), best_ratio(row, found, report)
    if reached is None:
        return "-"
    return f"{reached:.0f}" + ("" if value is None else f" ({value:.2f})")


def _described(row: Row) -> str:
    columns = GRIDS[row.grid].columns
    return ", ".join(
        f"{_HEADINGS[name]} {label}" for name, label in zip(columns, labels(row), strict=True)
    )


# ---- text and Markdown ---------------------------------------------------------------------------


def _machine_lines(report: Report) -> list[tuple[str, str]]:
    lines = list(report.machine.items())
    for dtype, rate in report.matmul.items():
        lines.append((f"matmul {dtype}", f"{rate:.1f} TFLOP/s, measured in this run"))
    return lines


def _tables(section: Section, report: Report) -> list[Table]:
    errors = error_table(section)
    return [speed_table(section, report)] + ([] if errors is None else [errors])


def text(report: Report) -> str:
    """For a terminal."""
    lines = [f"{name:<18} {value}" for name, value in _machine_lines(report)]
    for section in sections(report):
        for table in _tables(section, report):
            lines += ["", table.title, *_aligned([table.header, *table.rows])]
            lines += [f"[{n}] {note}" for n, note in enumerate(table.notes, 1)]
        lines += ["", *summary(section, report)]
    return "\n".join(lines).rstrip() + "\n"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def markdown(report: Report) -> str:
    """Tables, their footnotes and the means; the same report gives the same text."""
    lines = [MARKS[0], ""]
    lines += [f"- {name}: {_escaped(value)}" for name, value in _machine_lines(report)]
    lines += [
        "",
        'Medians; in brackets, how many times faster ours is (of errors: ours over it). "best" is '
        "cuDNN's rate in this run times the ratio that the fastest peer is known to have to it.",
    ]
    for section in sections(report):
        for number, table in enumerate(_tables(section, report)):
            lines += ["", f"{'###' if number else '##'} {_escaped(table.title)}", ""]
            lines.append(f"| {' | '.join(map(_escaped, table.header))} |")
            lines.append("|" + "---:|" * len(table.header))
            lines += [f"| {' | '.join(map(_escaped, row))} |" for row in table.rows]
            if table.notes:
                lines.append("")
            lines += [f"- [{n}] {_escaped(note)}" for n, note in enumerate(table.notes, 1)]
            if number == 0 and (means := summary(section, report)):
                lines += ["", *(f"- {_escaped(line)}" for line in means)]
    return "\n".join([*lines, "", MARKS[1], ""])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


def takes(page: str) -> bool:
    """Whether a page is empty or has the marks, so that nothing else in it is lost."""
    _, opening, rest = page.partition(MARKS[0])
    return not page.strip() or bool(opening and f"{MARKS[1]}\n" in rest)


def replaced(page: str, measured: str) -> str:
    """``page`` with what stands between the marks replaced; ``measured`` for an empty page.

    Examples
    --------
    >>> page = f"# Speed\\n{MARKS[0]}\\nold\\n{MARKS[1]}\\nWhy.\\n"
    >>> print(replaced(page, f"{MARKS[0]}\\nnew\\n{MARKS[1]}\\n").replace(MARKS[0], "<").replace(
    ...     MARKS[1], ">"), end="")
    # Speed
    <
    new
    >
    Why.
    """
    before, opening, rest = page.partition(MARKS[0])
    _, closing, after = rest.partition(f"{MARKS[1]}\n")
    return before + measured + after if opening and closing else measured


# ---- CSV -----------------------------------------------------------------------------------------

_ROW_FIELDS = tuple(field.name for field in dataclasses.fields(Row))
_FIELDS = (
    *_ROW_FIELDS,
    *("candidate", "kernel", "Br", "Bc", "seconds", "spread", "samples", "rate", "error", "reason"),
)


def to_csv(report: Report) -> str:
    """One line for each timing, behind lines that start with # and describe the machine."""
    stream = io.StringIO()
    for name, value in report.machine.items():
        stream.write(f"# {name}: {value}\n")
    for dtype, rate in report.matmul.items():
        stream.write(f"# matmul {dtype}: {rate!r}\n")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_FIELDS)
    for t in report.timings:
        row = [getattr(t.row, name) for name in _ROW_FIELDS]
        numbers = [t.seconds, t.spread, t.samples, t.rate, t.error]
        writer.writerow([*row, t.candidate, t.kernel, *(t.tile or ("", "")), *numbers, t.reason])
    return stream.getvalue()


def from_csv(written: str) -> Report:
    """The report of :func:`to_csv`, with nothing lost.

    Raises
    ------
    ValueError
        The text is no such file.
    """
    report = Report()
    lines = written.splitlines()
    while lines and lines[0].startswith("# "):
        name, _, value = lines.pop(0)[2:].partition(": ")
        if name.startswith("matmul "):
            report.matmul[name.removeprefix("matmul ")] = float(value)
        else:
            report.machine[name] = value
    reader = csv.DictReader(lines)
    if tuple(reader.fieldnames or ()) != _FIELDS:
        raise ValueError("this is no file that bench --csv wrote")
    for line in reader:
        report.timings.append(_timing(line))
    return report


def _timing(line: dict[str, str]) -> Timing:
    if None in line.values():
        raise ValueError("a line is cut short")
    given: dict[str, object] = {name: line[name] for name in _ROW_FIELDS}
    for name in ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim"):
        given[name] = int(line[name])
        if int(line[name]) < 1:
            raise ValueError(f"a line has {name} {line[name]}; expected a positive number")
    given["causal"] = line["causal"] == "True"
    row = Row(**given)  # type: ignore[arg-type]
    if row.grid not in GRIDS:
        raise ValueError(f"there is no grid {row.grid!r}")
    seconds = float(line["seconds"]) if line["seconds"] else None
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"a line has seconds {line['seconds']}; expected a positive number")
    return Timing(
        row=row,
        candidate=line["candidate"],
        kernel=line["kernel"],
        tile=(int(line["Br"]), int(line["Bc"])) if line["Br"] else None,
        seconds=seconds,
        spread=float(line["spread"]),
        samples=int(line["samples"]),
        error=float(line["error"]) if line["error"] else None,
        reason=line["reason"],
    )
