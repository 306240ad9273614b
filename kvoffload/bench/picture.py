"""A bench's results as one SVG that needs nothing but itself: panels of curves, drawn by the report's shapes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kvoffload.cli.report import plots
from kvoffload.cli.report.colours import COLOURS

_WIDTH, _HEIGHT = 760, 250  # of a panel, its titles included
_LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 80, 58, 660, 140
_COLOURS = ("host", "device", "evicted", "corrupt", "draining")
_TARGET = "miss"
_LINE_CHARACTERS = 105
_STYLE = """
svg{background:#fff}
text{font:13px system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1b1f24}
.quiet{fill:#56606b;font-size:12px}
.head{font-weight:600;font-size:14px}
.line{fill:none;stroke:#d8dde3;stroke-width:1;vector-effect:non-scaling-stroke}
.line.level{stroke-width:2}
.dot{fill:none;stroke-width:7;stroke-linecap:round;vector-effect:non-scaling-stroke}
.target .line{stroke-dasharray:6 4}
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Args:
        title: what it shows.
        unit: of its values.
        marks: what its columns are, from left to right.
        series: by name, a value for each column; at most five.
        target: a dashed line, None for none.
    """

    title: str
    unit: str
    marks: Sequence[str]
    series: Mapping[str, Sequence[float]]
    target: float | None = None


def picture(title: str, lines: Sequence[str], panels: Sequence[Panel]) -> str:
    """Return panels under each other, with a title and a few lines above them, as SVG."""
    lines = [part for line in lines for part in textwrap.wrap(line, _LINE_CHARACTERS)]
    head = 40 + 18 * len(lines)
    height = head + _HEIGHT * len(panels)
    box = f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}"'
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}><style>{_STYLE}{_colours()}</style>',
        _text(20, 26, title, "head"),
        *(_text(20, 46 + 18 * place, line, "quiet") for place, line in enumerate(lines)),
    ]
    for place, panel in enumerate(panels):
        shapes.append(f'<g transform="translate(0 {head + _HEIGHT * place})">{"".join(_panel(panel))}</g>')
    return "\n".join([*shapes, "</svg>", ""])


def _panel(panel: Panel) -> Iterator[str]:
    values = [value for series in panel.series.values() for value in series]
    end, ticks = plots.axis(max([*values, panel.target or 0.0]))
    yield _text(20, 22, f"{panel.title}, {panel.unit}", "head")
    left = 20.0
    for key, name in zip(_COLOURS, [*panel.series], strict=False):
        yield f'<rect class="{plots.class_of(key)}" x="{left:.0f}" y="32" width="10" height="10"/>'
        yield _text(left + 15, 42, name, "quiet")
        left += 36 + 7.2 * len(name)
    for tick in ticks:
        y = _TOP + _PLOT_HEIGHT * (1 - tick.share) + 4
        yield _text(_LEFT - 8, y, tick.label, "quiet", "end")
    columns = len(panel.marks)
    for place, mark in enumerate(panel.marks):
        x = _LEFT + _PLOT_WIDTH * _share(place, columns)
        yield _text(x, _TOP + _PLOT_HEIGHT + 20, mark, "quiet", "middle")
    yield (
        f'<svg x="{_LEFT}" y="{_TOP}" width="{_PLOT_WIDTH}" height="{_PLOT_HEIGHT}" overflow="visible" '
        f'preserveAspectRatio="none" viewBox="0 0 {plots.WIDTH:g} {plots.HEIGHT:g}">'
    )
    yield plots.grid(tick.share for tick in ticks)
    if panel.target is not None:
        yield f'<g class="target">{plots.level(_TARGET, 0, 1, panel.target / end)}</g>'
    for key, series in zip(_COLOURS, panel.series.values(), strict=False):
        places = [(_share(place, columns), value / end) for place, value in enumerate(series)]
        yield plots.curve(key, places) + plots.dots(key, places)
    yield "</svg>"


def _share(place: int, columns: int) -> float:
    return (place + 0.5) / columns


def _text(x: float, y: float, text: str, name: str, anchor: str = "start") -> str:
    return f'<text class="{name}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _colours() -> str:
    return "".join(
        f".{plots.class_of(key)}{{fill:{COLOURS[key]}}}"
        f".dot.{plots.class_of(key)},.level.{plots.class_of(key)}{{fill:none;stroke:{COLOURS[key]}}}"
        for key in (*_COLOURS, _TARGET)
    )
