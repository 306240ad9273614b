"""Since when each request has held pins: the oldest pin is the first sign of a leak."""

from __future__ import annotations

from kvoffload.bus.bus import Bus
from kvoffload.model.events import HitDropped, HitPinned, LoadEnded, LoadScheduled
from kvoffload.model.ids import RequestId
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.watchdog import Since


class PinAges:
    """Follows the events that begin and end pins.

    Args:
        clocks: the source of time.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._since: dict[RequestId, Since] = {}
        self.oldest: Since | None = None
        """Start of the oldest pin, or None. Replaced, never changed, so other threads may read it."""

    def subscribe(self, bus: Bus) -> None:
        """Follow the pins from now on."""
        bus.count(HitPinned, self._begins)
        bus.count(LoadScheduled, self._begins)
        bus.count(HitDropped, self._ends)
        bus.count(LoadEnded, self._ends)

    def forget_all(self) -> None:
        """Events of their ends will not come."""
        self._since.clear()
        self.oldest = None

    def _begins(self, event: HitPinned | LoadScheduled) -> None:
        if event.request not in self._since:
            self._since[event.request] = Since(self._clocks.unix(), self._clocks.monotonic())
        self.oldest = next(iter(self._since.values()))

    def _ends(self, event: HitDropped | LoadEnded) -> None:
        self._since.pop(event.request, None)
        self.oldest = next(iter(self._since.values()), None)
