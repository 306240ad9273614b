"""A source of metrics for tests without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvoffload.bus.bus import Bus
from kvoffload.telemetry.catalogue import CATALOGUE, Metric, Series
from kvoffload.telemetry.counters import Counters


class FakeSource:
    """A source of metrics that counts the messages on its bus. All gauges are 0, except those in `state`."""

    def __init__(self, state: Mapping[str, Series] | None = None) -> None:
        self.state = state or {}
        self.bus, self.counters = Bus(), Counters()
        self.counters.subscribe(self.bus)

    def gauges(self, metrics: Iterable[Metric] = CATALOGUE, /) -> dict[str, Series]:
        return {
            metric.name: {**dict.fromkeys(metric.series, 0), **self.state.get(metric.name, {})}
            for metric in metrics
            if metric.read is not None
        }
