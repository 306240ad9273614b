"""What is new since the last time: for monitoring that is told of changes instead of scraping.

Asked on the engine's thread after every step, so that asking in vain costs two comparisons, and asking when something
was counted costs one comparison a metric.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvoffload.telemetry.catalogue import BY_NAME, Kind
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.gauges import ASKED_COUNTERS, GaugeSource
from kvoffload.telemetry.snapshot import Labels

_PATIENCE_S = 1.0  # how long hooks' times, which every step has, wait for something else to go with

Series = dict[str, dict[Labels, float]]


class Counted(GaugeSource, Protocol):
    """Who counts: the scheduler's side."""

    @property
    def counters(self) -> Counters: ...


@dataclass(frozen=True, slots=True)
class Change:
    """What has changed, by metric name and label values.

    Args:
        counts: what was added to counters.
        gauges: gauges as they are now.
        samples: of histograms, each sample.
    """

    counts: Series = field(default_factory=dict)
    gauges: Series = field(default_factory=dict)
    samples: dict[str, dict[Labels, list[float]]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.gauges or self.samples)


class Changes:
    """Remembers what was told. One at a time for one `Counters`, used on the counting thread.

    Args:
        source: who counts.
        now: monotonic seconds.
    """

    def __init__(self, source: Counted, now: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._now = now
        self._due_s = now()
        self._changes = -1
        self._sent: Series = {}
        source.counters.keep_samples()

    def take(self) -> Change | None:
        """Return what has changed since the last call, or None.

        Hooks' times go with the next other change, or after a second: they alone are no news in every step.
        """
        counters, now = self._source.counters, self._now()
        if counters.changes == self._changes and now < self._due_s:
            return None
        self._changes, self._due_s = counters.changes, now + _PATIENCE_S
        asked = self._source.gauges().numbers()
        kept = {name: asked.pop(name) for name in ASKED_COUNTERS}
        counts = self._take_changed({**counters.counts, **kept})
        change = Change(counts, self._take_changed(asked), counters.take_samples())
        return None if change.is_empty else change

    def _take_changed(self, numbers: Mapping[str, Mapping[Labels, float]]) -> Series:
        changed = {}
        for name, series in numbers.items():
            sent = self._sent.get(name)
            if series == sent:
                continue
            changed[name] = _differences(name, series, sent)
            self._sent[name] = dict(series)
        return {name: series for name, series in changed.items() if series}


def _differences(
    name: str, series: Mapping[Labels, float], sent: Mapping[Labels, float] | None
) -> dict[Labels, float]:
    """Return what was added to a counter, or what a gauge has become; at first, all of a gauge."""
    before = sent or {}
    if BY_NAME[name].kind is Kind.COUNTER:
        return {
            labels: now - before.get(labels, 0)
            for labels, now in series.items()
            if now != before.get(labels, 0)
        }
    known = {**dict.fromkeys(BY_NAME[name].series if sent is None else before, 0.0), **series}
    return {labels: now for labels, now in known.items() if sent is None or now != before.get(labels, 0)}
