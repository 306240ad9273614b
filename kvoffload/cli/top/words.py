"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.model.config import size_text

_UNKNOWN = "-"
_LEVELS = "▁▂▃▄▅▆▇█"


def count(number: float | None) -> str:
    """A number of things."""
    return _UNKNOWN if number is None else f"{number:,.0f}"


def per_second(number: float | None) -> str:
    """A rate: whole where it is large."""
    if number is None:
        return _UNKNOWN
    return f"{number:,.0f}" if number >= 100 or number == 0 else f"{number:.1f}"


def seconds(number: float | None) -> str:
    """A sum of seconds, or of seconds per second."""
    if number is None:
        return _UNKNOWN
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.2f}"


def share(ratio: float | None) -> str:
    """A part of a whole."""
    return _UNKNOWN if ratio is None else f"{100 * ratio:.1f} %"


def size(number: float | None) -> str:
    """A number of bytes."""
    return _UNKNOWN if number is None else size_text(number)


def duration(seconds: float | None) -> str:
    """A time, from microseconds to days."""
    if seconds is None:
        return _UNKNOWN
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (120, 1, "s")):
        if seconds < limit:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds / 60:,.0f} min"


def bar(part: float, whole: float, width: int) -> str:
    """A bar that is full at the whole."""
    cells = round(width * min(part / whole, 1)) if whole > 0 else 0
    return "█" * cells + "░" * (width - cells)


def sparkline(numbers: Sequence[float | None], width: int, top: float | None = None) -> str:
    """The last `width` numbers as a line of bars, from 0 to `top` or the largest; a gap where one is not known."""
    shown = numbers[-width:]
    most = top or max((number for number in shown if number is not None), default=0.0)
    bars = (
        " " if number is None else _LEVELS[min(int(number / most * 8), 7)] if most > 0 else _LEVELS[0]
        for number in shown
    )
    return "".join(bars).rjust(width)
