"""Shapes of SVG from numbers, without text: what a page writes beside them stays readable at every width.

The drawing area is 1000 wide and 300 high and is stretched to its place; lines and dots keep their thickness
(`vector-effect`). Every number is formatted here, every name is a class of the page's style: nothing needs escaping.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 1000.0, 300.0
_NOT_IN_NAMES = re.compile("[^a-z0-9]+")
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class Tick(NamedTuple):
    """A mark of an axis: where, as a share of its length, and what is written there."""

    share: float
    label: str


def axis(top: float, form: str = "{:,g}") -> tuple[float, list[Tick]]:
    """Return the least round number that is not below `top`, and the marks from 0 to it; for `top` 0, as for 1."""
    wanted = top if top > 0 else 1.0
    size = 10.0 ** math.floor(math.log10(wanted))
    step = next(size * one / 5 for one in (*_STEPS, 20.0, 50.0) if size * one >= wanted * (1 - 1e-9))
    count = math.ceil(wanted / step - 1e-9)
    every = 2 if count > 4 else 1
    count += -count % every
    end = step * count
    return end, [
        Tick(number / count, form.format(round(step * number, 9))) for number in range(0, count + 1, every)
    ]


def grid(shares: Iterable[float]) -> str:
    """Horizontal lines at these shares of the height."""
    return "".join(_line("grid", 0, _y(share), WIDTH, _y(share)) for share in shares)


def stacked_bars(columns: Sequence[Mapping[str, float]], keys: Sequence[str]) -> str:
    """Bars of equal width, one a column, whose parts are shares of the height, the first key at the bottom."""
    width = WIDTH / max(len(columns), 1)
    shapes = []
    for place, column in enumerate(columns):
        bottom = 0.0
        for key in keys:
            share = column.get(key, 0.0)
            if share > 0:
                shapes.append(_box(key, place * width + width * 0.08, bottom, width * 0.84, share))
            bottom += share
    return "".join(shapes)


def stacked_areas(columns: Sequence[Mapping[str, float]], keys: Sequence[str]) -> str:
    """Areas on top of each other, the first key at the bottom; each column holds until the next."""
    width = WIDTH / max(len(columns), 1)
    floors = [0.0] * len(columns)
    shapes = []
    for key in keys:
        tops = [floor + column.get(key, 0.0) for floor, column in zip(floors, columns, strict=True)]
        if tops != floors:
            points = [*_steps(tops, width), *reversed(_steps(floors, width))]
            shapes.append(f'<path class="area {class_of(key)}" d="M{" L".join(points)} Z"/>')
        floors = tops
    return "".join(shapes)


def mirrored_bars(up: Sequence[float], down: Sequence[float], up_key: str, down_key: str) -> str:
    """Bars up and down from the middle; 1 is the whole way."""
    width = WIDTH / max(len(up), 1)
    shapes = []
    for place, (above, below) in enumerate(zip(up, down, strict=True)):
        left, thick = place * width + width * 0.08, width * 0.84
        if above > 0:
            shapes.append(_box(up_key, left, 0.5, thick, above / 2))
        if below > 0:
            shapes.append(_box(down_key, left, 0.5 - below / 2, thick, below / 2))
    return "".join(shapes) + _line("zero", 0, HEIGHT / 2, WIDTH, HEIGHT / 2)


def dots(key: str, places: Iterable[tuple[float, float]]) -> str:
    """Round dots at shares of width and height."""
    return "".join(
        f'<path class="dot {class_of(key)}" d="M{x * WIDTH:.1f} {_y(y):.1f} h0"/>' for x, y in places
    )


def level(key: str, left: float, right: float, share: float) -> str:
    """A horizontal line between two shares of the width."""
    return _line(f"level {class_of(key)}", left * WIDTH, _y(share), right * WIDTH, _y(share))


def curve(key: str, places: Iterable[tuple[float, float]]) -> str:
    """A line through points at shares of width and height."""
    points = " L".join(f"{x * WIDTH:.1f} {_y(y):.1f}" for x, y in places)
    return f'<path class="line level {class_of(key)}" d="M{points}"/>' if points else ""


def bar(key: str, share: float) -> str:
    """One bar from the left over the whole height."""
    return _box(key, 0, 0, max(share, 0.002) * WIDTH, 1)


def _steps(tops: Sequence[float], width: float) -> list[str]:
    return [
        f"{x:.1f} {_y(top):.1f}"
        for place, top in enumerate(tops)
        for x in (place * width, (place + 1) * width)
    ]


def _box(key: str, left: float, bottom: float, width: float, height: float) -> str:
    top = _y(bottom + height)
    return (
        f'<rect class="{class_of(key)}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{max(height * HEIGHT, 0.5):.1f}"/>'
    )


def _line(name: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="line {name}" d="M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}"/>'


def class_of(key: str) -> str:
    """Return the style's class of a thing's colour."""
    return f"c-{_NOT_IN_NAMES.sub('-', key)}"


def _y(share: float) -> float:
    return HEIGHT * (1 - min(max(share, 0.0), 1.0))
