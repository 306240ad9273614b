"""Since when each request's pins have been there: the oldest one tells of a leak before anything else does."""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.bus.bus import Bus
from kvoffload.model.events import HitDropped, HitPinned, LoadEnded, LoadScheduled
from kvoffload.model.ids import RequestId


class PinAges:
    """Follows the events that begin and end pins.

    Args:
        now: unix time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[RequestId, float] = {}
        self.oldest_s = 0.0
        """Unix time of the oldest pin, 0 without one. Written whole, so another thread may read it."""

    def subscribe(self, bus: Bus) -> None:
        """Follow the pins from now on."""
        bus.count(HitPinned, self._begins)
        bus.count(LoadScheduled, self._begins)
        bus.count(HitDropped, self._ends)
        bus.count(LoadEnded, self._ends)

    def _begins(self, event: HitPinned | LoadScheduled) -> None:
        self._since.setdefault(event.request, self._now())
        self.oldest_s = next(iter(self._since.values()))

    def _ends(self, event: HitDropped | LoadEnded) -> None:
        self._since.pop(event.request, None)
        self.oldest_s = next(iter(self._since.values()), 0.0)
