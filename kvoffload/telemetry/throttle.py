"""Saying things seldom enough to be read."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class AtMostEvery:
    """Says yes at most once every `seconds` for every key, and counts what it held back.

    Args:
        seconds: the least time between two yeses.
        now: the clock.
    """

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds = seconds
        self._now = now
        self._last: dict[Hashable, float] = {}
        self._held_back: dict[Hashable, int] = {}

    def due(self, key: Hashable) -> int | None:
        """Return how many were held back since the last yes, or None to hold this one back too."""
        now = self._now()
        last = self._last.get(key)
        if last is not None and now - last < self._seconds:
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return None
        self._last[key] = now
        return self._held_back.pop(key, 0)
