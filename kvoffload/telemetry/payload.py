"""Messages to an engine's front end. A message has the changes of the metrics since the last message.

    {metric: {labels: value}}        a counter's increase, a gauge's value, a histogram's samples [seconds, ..]

`labels` are the label values of a series, joined by commas. The label values come from enums and contain no commas. All
values have types that msgpack supports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvoffload.telemetry.catalogue import BY_NAME, Kind, Labels, Metric
from kvoffload.telemetry.counters import Source, all_series

Payload = dict[str, dict[str, Any]]

_COMMA = ","
_MIB = 1 << 20
# The minimum time between two messages of a busy engine. A message takes as much time as planning several copies, and
# Prometheus scrapes less often than once a second.
_APART_S = 1.0


class Changes:
    """Creates the messages of one engine. Use this class on the engine's thread.

    An engine can have only one `Changes`, because `take` removes the samples from the counters. If nothing has changed,
    `take` makes two comparisons; otherwise one comparison for each metric.

    Args:
        source: the scheduler side that has the metrics.
        now: returns the monotonic clock's time in seconds.
    """

    def __init__(self, source: Source, now: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self.now = now
        self.next_s = now()
        """The time at which a busy engine may send its next message."""
        self._changes = -1
        self._sent: dict[str, Mapping[Labels, Any]] = {}
        source.counters.keep_samples()

    def take(self) -> Payload | None:
        """Return the changes since the last call; None if nothing has changed. The first call returns all gauges.

        Because every step adds hook times, they count as a change only a second after the last message.
        """
        counters, now = self._source.counters, self.now()
        if counters.changes == self._changes and now < self.next_s:
            return None
        self._changes = counters.changes
        self.next_s = now + _APART_S
        payload: Payload = {}
        for metric, series in all_series(counters.counts, self._source.gauges(), counters.take_samples()):
            if changed := series if metric.kind is Kind.HISTOGRAM else self._changed(metric, series):
                payload[metric.name] = {_COMMA.join(labels): value for labels, value in changed.items()}
        return payload or None

    def _changed(self, metric: Metric, series: Mapping[Labels, Any]) -> Mapping[Labels, Any]:
        """Return a counter's increases or a gauge's new values, by label values, without unchanged series."""
        sent = self._sent.get(metric.name, {})
        if series == sent:
            return {}
        if metric.kind is Kind.COUNTER:
            changed = {
                labels: now - sent.get(labels, 0)
                for labels, now in series.items()
                if now != sent.get(labels, 0)
            }
        else:  # a series that the gauge no longer has counts as 0, as in a scrape
            series = {**dict.fromkeys(sent, 0), **series}
            changed = {labels: now for labels, now in series.items() if now != sent.get(labels)}
        self._sent[metric.name] = {**sent, **series}
        return changed


def split_labels(joined: str) -> tuple[str, ...]:
    return tuple(joined.split(_COMMA)) if joined else ()


def merge(payload: Payload, later: Mapping[str, Any]) -> None:
    """Add a later message to `payload`: add up counters, append samples, and replace gauges.

    Metrics that the catalogue does not have are left out. `later` stays unchanged.
    """
    for metric, joined, value in entries(later):
        series = payload.setdefault(metric.name, {})
        if metric.kind is Kind.GAUGE or joined not in series:
            series[joined] = value
        else:
            series[joined] = series[joined] + value  # `+=` would change a list that `later` may own


def summarize(payload: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers in a message for vLLM's periodic log line."""
    hit, missed = (_count(payload, "kvoffload_lookup_tokens_total", result) for result in ("hit", "miss"))
    return {
        "hit_tokens": hit,
        "hit_percent": round(100 * hit / (hit + missed), 1) if hit + missed else 0.0,
        "stored_blocks": _count(payload, "kvoffload_store_blocks_total", "stored"),
        "loaded_blocks": _count(payload, "kvoffload_load_blocks_total", "loaded"),
        "failed_load_blocks": _total(payload, "kvoffload_load_blocks_total")
        - _count(payload, "kvoffload_load_blocks_total", "loaded")
        - _count(payload, "kvoffload_load_blocks_total", "cancelled"),
        "stored_mib": round(_count(payload, "kvoffload_transfer_bytes_total", "host,store") / _MIB, 1),
        "loaded_mib": round(_count(payload, "kvoffload_transfer_bytes_total", "host,load") / _MIB, 1),
        "evicted_blocks": _total(payload, "kvoffload_evicted_blocks_total", "host,"),
    }


def entries(payload: Mapping[str, Any]) -> Iterator[tuple[Metric, str, Any]]:
    """Yield the metric, the joined labels and the value of each series in a message, without unknown metrics."""
    for name, series in payload.items():
        if (metric := BY_NAME.get(name)) is not None:
            for joined, value in series.items():
                yield metric, joined, value


def _count(payload: Mapping[str, Any], name: str, joined: str) -> int:
    return int(payload.get(name, {}).get(joined, 0))


def _total(payload: Mapping[str, Any], name: str, first: str = "") -> int:
    """Return the sum of all series of a counter whose joined labels begin with `first`."""
    series = payload.get(name, {})
    return int(sum(value for joined, value in series.items() if joined.startswith(first)))
