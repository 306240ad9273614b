"""Keeps the predictions about tiers of other sizes up to date, on the portal's loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf

from kvoffload.bus.bus import Bus, Tick
from kvoffload.bus.guard import call_guarded
from kvoffload.model.events import MetricsSampled, RequestsEnded
from kvoffload.telemetry.capacity import CapacityCurve

_PERIOD_S = 1.0
_APART_S = 60.0  # seconds between two samples in the journal of a busy engine


class Predictions:
    """Feeds the capacity curve once a second, and publishes samples of metrics for the journal.

    The loop's own timer wakes it, because waking the loop would cost the engine's thread some 40 us. The engine's
    thread publishes a sample that is ready when the engine becomes idle, or at a tick.

    Args:
        curve: the curve, which collects facts of the bus.
        bus: the bus on which `MetricsSampled` is published.
        sample: returns a sample; None if nothing records samples.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        curve: CapacityCurve,
        bus: Bus,
        sample: Callable[[], MetricsSampled] | None,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._curve = curve
        self._bus = bus
        self._sample = sample
        self._sleep = sleep
        self._ready: MetricsSampled | None = None
        self._due_s = -inf
        curve.subscribe(bus)
        if sample is not None:
            bus.count(RequestsEnded, self.publish)
            bus.count(Tick, self._tick)

    async def run(self, on_removed: Callable[[str, Exception], object]) -> None:
        """Update the predictions until the task is cancelled."""
        try:
            while True:
                await self._sleep(_PERIOD_S)
                await self.refresh()
        except Exception as exc:
            self._curve.series = {}  # old predictions would seem to be today's
            call_guarded(on_removed, type(self).__name__, exc)

    async def refresh(self) -> None:
        """Handle all collected facts, and make a sample ready."""
        while self._curve.take():
            await self._sleep(0)  # the loop also ends copies
        self._curve.measure()
        self._ready = self._sample() if self._sample is not None else None

    def publish(self, _: RequestsEnded | None = None) -> None:
        """Publish the sample that is ready. Only the engine's thread may call this method."""
        ready, self._ready = self._ready, None
        if ready is not None:
            self._due_s = self._bus.hook.now + _APART_S
            self._bus.publish(ready)

    def _tick(self, _: Tick) -> None:
        if self._bus.hook.now >= self._due_s:
            self.publish()
