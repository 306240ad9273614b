"""Messages to an engine's front end. A message has the changes of the metrics since the last message.

    {metric: {labels: value}}        a counter's increase, a gauge's value, a histogram's samples [seconds, ..]

`labels` are the label values of a series, joined by commas. The label values come from enums and contain no commas. All
values have types that msgpack supports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvoffload.telemetry.catalogue import BY_NAME, CATALOGUE, Kind, Labels, Metric
from kvoffload.telemetry.counters import Source, all_series

Payload = dict[str, dict[str, Any]]

_COMMA = ","
_MIB = 1 << 20
# The minimum time between two messages with the same metric of a busy engine. Prometheus scrapes less often than once a
# second.
_APART_S = 1.0
# How many metrics a busy engine's message has at most. A message with all metrics takes longer than most hooks.
_AT_ONCE = 10


class Changes:
    """Creates the messages of one engine. Use this class on the engine's thread.

    A message of an idle engine has all metrics. A busy engine sends them in several messages, one in each step, so that
    no step takes the time that a message with all metrics takes. After the last of them it sends nothing for a second.

    An engine can have only one `Changes`, because `take` removes the samples from the counters. If nothing has changed,
    `take` makes two comparisons; otherwise one comparison for each metric in the message.

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
        self._left: Sequence[Metric] = ()  # what a busy engine has yet to send before it pauses
        self._sent: dict[str, Mapping[Labels, Any]] = {}
        source.counters.keep_samples()

    def take(self, *, is_busy: bool = False) -> Payload | None:
        """Return the changes since the last calls; None if nothing has changed. The first messages have all gauges.

        Because every tick adds hook times, they count as a change only a second after the last message.

        Args:
            is_busy: whether the engine has requests or copies. If so, the message has only the next few metrics, and
                the caller waits until `next_s`.
        """
        now, changes = self.now(), self._source.counters.changes
        if is_busy:
            return self._message(self._next_metrics(now))
        if changes == self._changes and now < self.next_s:
            return None
        self._changes = changes
        self._left = ()
        self.next_s = now + _APART_S
        return self._message(CATALOGUE)

    def _next_metrics(self, now: float) -> Sequence[Metric]:
        """Return the metrics of a busy engine's next message."""
        if not self._left:
            self._left = CATALOGUE
            self._changes = -1  # so that the next message of an idle engine has all metrics
        metrics = self._left[:_AT_ONCE]
        self._left = self._left[_AT_ONCE:]
        self.next_s = now if self._left else now + _APART_S
        return metrics

    def _message(self, metrics: Sequence[Metric]) -> Payload | None:
        counters, payload = self._source.counters, Payload()
        read = self._source.gauges(metrics), counters.take_samples(metrics)
        for metric, series in all_series(counters.counts, *read, metrics):
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
