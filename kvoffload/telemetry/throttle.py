"""Limits how often something is logged."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class AtMostEvery:
    """Allows at most one line every `seconds` for each key, and counts those it held back.

    Args:
        seconds: between two lines.
        now: the clock.
    """

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds = seconds
        self._now = now
        self._last: dict[Hashable, float] = {}
        self._held_back: dict[Hashable, int] = {}

    def due(self, key: Hashable) -> int | None:
        """Return how many were held back since the last line, or None to hold this one back too."""
        now = self._now()
        last = self._last.get(key)
        if last is not None and now - last < self._seconds:
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return None
        self._last[key] = now
        return self._held_back.pop(key, 0)
