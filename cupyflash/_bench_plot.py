# SPDX-License-Identifier: MIT
"""The plot of ``bench``: an SVG of bars, for which nothing has to be installed."""

from __future__ import annotations

from html import escape

from cupyflash import _bench
from cupyflash._bench import OURS, PLAIN, Report, Timing
from cupyflash._bench_grids import HOST, Row
from cupyflash._bench_report import Section, best, labels, sections

_COLOURS = {
    OURS: "#1f5f8b",
    PLAIN: "#7fb0d1",
    _bench.CUDNN: "#76b900",
    _bench.FLASH2: "#d9822b",
    _bench.EFFICIENT: "#9c6ade",
    _bench.UNFUSED: "#b98f6b",
    _bench.TORCH: "#b3402a",
    _bench.CUPY: "#888888",
}
_OTHER_COLOURS = ("#3d8f8f", "#6b5f9e", "#a04f7f")  # of our kernels by name
_WIDTH, _HEIGHT = 560, 260  # of a panel
_LEFT, _TOP, _BOTTOM = 50, 40, 45
_COLUMNS = 2

Rows = dict[Row, dict[str, Timing]]


def plot(report: Report) -> str:
    """Bars of every candidate on every row, a panel for each head_dim and mask of a grid.

    A dash over the bars is what the fastest known peer would reach.
    """
    found = [panel for section in sections(report) for panel in _panels(section)]
    names = list(dict.fromkeys(t.candidate for t in report.timings if t.seconds is not None))
    colours = {name: _colour(name, names) for name in names}
    lines = -(-len(found) // _COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_COLUMNS * _WIDTH} '
        f'{30 + lines * _HEIGHT}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(colours, report.machine.get("GPU", "")),
    ]
    for index, (title, rows) in enumerate(found):
        x, y = index % _COLUMNS * _WIDTH, 30 + index // _COLUMNS * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">')
        parts += [*_panel(title, rows, colours, report), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _colour(name: str, names: list[str]) -> str:
    others = [other for other in names if other not in _COLOURS]
    return _COLOURS.get(name) or _OTHER_COLOURS[others.index(name) % len(_OTHER_COLOURS)]


def _panels(section: Section) -> list[tuple[str, Rows]]:
    """Rows that differ in head_dim or mask are apart where there are many."""
    if section.grid != "paper":
        better = " (less is better)" if section.unit == HOST else ""
        return [(f"{section.grid}, {section.dtype}, {section.unit}{better}", section.rows)]
    panels: dict[str, Rows] = {}
    for row, found in section.rows.items():
        mask = "causal" if row.causal else "not causal"
        title = f"{section.dtype}, head_dim {row.head_dim}, {mask}, {section.unit}"
        panels.setdefault(title, {})[row] = found
    return list(panels.items())


def _legend(colours: dict[str, str], gpu: str) -> list[str]:
    parts, x = [], 10.0
    for name, colour in colours.items():
        parts.append(
            f'<rect x="{x:.0f}" y="10" width="11" height="11" fill="{colour}"/>'
            f'<text x="{x + 15:.0f}" y="20">{escape(name)}</text>'
        )
        x += 35 + 6.5 * len(name)
    return [*parts, f'<text x="{x:.0f}" y="20" fill="#555">{escape(gpu)}</text>']


def _panel(title: str, rows: Rows, colours: dict[str, str], report: Report) -> list[str]:
    rates = [t.rate for found in rows.values() for t in found.values() if t.rate is not None]
    known = {row: best(row, found, report) for row, found in rows.items()}
    top = _round_up(max([*rates, *(value for value in known.values() if value)], default=1.0))
    floor = _HEIGHT - _BOTTOM

    def y(rate: float) -> float:
        return floor - rate / top * (floor - _TOP)

    parts = [f'<text x="{_LEFT}" y="24" font-size="12">{escape(title)}</text>']
    for step in range(5):
        rate = top * step / 4
        parts.append(
            f'<line x1="{_LEFT}" y1="{y(rate):.1f}" x2="{_WIDTH - 15}" y2="{y(rate):.1f}" '
            f'stroke="#e5e5e5"/><text x="{_LEFT - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">'
            f"{rate:g}</text>"
        )
    shown = [name for name in colours if any(name in found for found in rows.values())]
    step_width = (_WIDTH - _LEFT - 15) / len(rows)
    width = 0.85 * step_width / max(len(shown), 1)
    for index, (row, found) in enumerate(rows.items()):
        left = _LEFT + index * step_width
        for place, name in enumerate(shown):
            timing = found.get(name)
            if timing is None or timing.rate is None:
                continue
            parts.append(
                f'<rect x="{left + place * width:.1f}" y="{y(timing.rate):.1f}" '
                f'width="{width:.1f}" height="{floor - y(timing.rate):.1f}" fill="{colours[name]}">'
                f"<title>{escape(name)}: {timing.rate:.4g} {row.unit}</title></rect>"
            )
        if (value := known[row]) is not None:
            parts.append(
                f'<line x1="{left:.1f}" y1="{y(value):.1f}" x2="{left + 0.85 * step_width:.1f}" '
                f'y2="{y(value):.1f}" stroke="black" stroke-width="1.5" stroke-dasharray="4 2"/>'
            )
        parts += _label(row, len(rows), left + 0.42 * step_width, floor)
    return parts


def _label(row: Row, count: int, x: float, floor: float) -> list[str]:
    """Of a row: its length, or all that tells it from the others on lines of their own."""
    texts = [f"{row.seqlen_k:,}"] if row.grid == "paper" else labels(row)
    if row.unit != HOST and count > 8:  # too narrow for more
        texts = [" ".join(texts)]
        return [
            f'<text transform="translate({x:.1f} {floor + 8}) rotate(20)" font-size="7">'
            f"{escape(texts[0])}</text>"
        ]
    return [
        f'<text x="{x:.1f}" y="{floor + 11 + 10 * n}" text-anchor="middle" font-size="9">'
        f"{escape(text)}</text>"
        for n, text in enumerate(texts)
    ]


def _round_up(value: float) -> float:
    """The next 1, 2, 3, 4, 6 or 8 times a power of ten.

    Examples
    --------
    >>> _round_up(655.0), _round_up(4.4), _round_up(0.03), _round_up(9.0)
    (800.0, 6.0, 0.03, 10.0)
    """
    power = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 1.0
    while power > value:
        power /= 10
    return next(round(step * power, 12) for step in (1, 2, 3, 4, 6, 8, 10) if step * power >= value)
