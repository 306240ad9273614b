"""Changes since the last call, for monitoring that receives changes instead of scraping.

It is called on the engine's thread after every step. Without a change it costs two comparisons, with one a comparison per
metric.
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

_PATIENCE_S = 1.0  # hooks' times wait this long for another change

Series = dict[str, dict[Labels, float]]


class Counted(GaugeSource, Protocol):
    """Has counters and gauges: the scheduler's side."""

    @property
    def counters(self) -> Counters: ...


@dataclass(frozen=True, slots=True)
class Change:
    """Changes by metric name and label values.

    Args:
        counts: increases of counters.
        gauges: new values of gauges.
        samples: each new sample of histograms.
    """

    counts: Series = field(default_factory=dict)
    gauges: Series = field(default_factory=dict)
    samples: dict[str, dict[Labels, list[float]]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.gauges or self.samples)


class Changes:
    """Finds the changes since its last call. One for each `Counters`, used on the counting thread.

    Args:
        source: the scheduler's side.
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
        """Return the changes since the last call, or None.

        Hooks' times are returned with the next other change, or after a second: every step has them.
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
    """Return a counter's increases, or a gauge's changed values; the first time, all values of a gauge."""
    before = sent or {}
    if BY_NAME[name].kind is Kind.COUNTER:
        return {
            labels: now - before.get(labels, 0)
            for labels, now in series.items()
            if now != before.get(labels, 0)
        }
    known = {**dict.fromkeys(BY_NAME[name].series if sent is None else before, 0.0), **series}
    return {labels: now for labels, now in known.items() if sent is None or now != before.get(labels, 0)}
