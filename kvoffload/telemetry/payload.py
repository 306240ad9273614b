"""Messages for an engine's front end. A message has what changed in the metrics since the last one, in msgpack's types.

    {metric: {labels: value}}        a counter's increase, a gauge's value, a histogram's samples [seconds, ..]

`labels` are the label values of a series, joined by commas. The values come from enums, so they contain no commas.
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
# The minimum time between two messages of a busy engine. Scrapes are rarer than this, and a message costs as much
# time as planning several copies.
_APART_S = 1.0


class Changes:
    """Creates the messages of one engine. Use it on the thread that updates the engine's counters.

    An engine can have only one `Changes`, because `take` removes the samples from the counters. `take` makes two
    comparisons if nothing has changed, and otherwise one comparison for each metric.

    Args:
        source: the scheduler's side whose counters and gauges are sent.
        now: returns the time in seconds of the monotonic clock.
    """

    def __init__(self, source: Source, now: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self.now = now
        self.next_s = now()
        """The time at which a busy engine sends its next message. After that, hook times are sent even if nothing else
        has changed."""
        self._changes = -1
        self._sent: dict[str, Mapping[Labels, Any]] = {}
        source.counters.keep_samples()

    def take(self) -> Payload | None:
        """Return what has changed since the last call; None if nothing has. The first call returns all gauges.

        Every step adds hook times. So hook times count as a change only if a second has passed since the last message.
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
        """Return by how much each series of a counter has increased, or a gauge's new values."""
        sent = self._sent.get(metric.name, {})
        if series == sent:
            return {}
        if metric.kind is Kind.COUNTER:
            changed = {
                labels: now - sent.get(labels, 0)
                for labels, now in series.items()
                if now != sent.get(labels, 0)
            }
        else:  # if the gauge no longer has a series, send 0 for it, as a scrape would show
            series = {**dict.fromkeys(sent, 0), **series}
            changed = {labels: now for labels, now in series.items() if now != sent.get(labels)}
        self._sent[metric.name] = {**sent, **series}
        return changed


def split_labels(joined: str) -> tuple[str, ...]:
    return tuple(joined.split(_COMMA)) if joined else ()


def merge(payload: Payload, later: Mapping[str, Any]) -> None:
    """Add a later message to `payload`. Counters are added up, samples are appended, and gauges are replaced.

    `later` is not changed. Metrics that this version does not know are left out.
    """
    for metric, joined, value in entries(later):
        series = payload.setdefault(metric.name, {})
        if metric.kind is Kind.GAUGE or joined not in series:
            series[joined] = value
        else:
            series[joined] = series[joined] + value  # adds numbers, and concatenates lists of samples


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
    """Yield the metric, the joined labels and the value of each series in a message. Unknown metrics are left out."""
    for name, series in payload.items():
        if (metric := BY_NAME.get(name)) is not None:
            for joined, value in series.items():
                yield metric, joined, value


def _count(payload: Mapping[str, Any], name: str, joined: str) -> int:
    return int(payload.get(name, {}).get(joined, 0))


def _total(payload: Mapping[str, Any], name: str, first: str = "") -> int:
    """Return the sum of a counter's series whose joined labels begin with `first`."""
    series = payload.get(name, {})
    return int(sum(value for joined, value in series.items() if joined.startswith(first)))
