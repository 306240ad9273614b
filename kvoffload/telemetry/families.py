"""The catalogue's metrics as ordinary Prometheus metrics. The engine chooses their classes; vLLM uses its own or Ray's.

A process may create the metrics several times, for example for a second engine or logger, but the registry accepts
each name only once. So the newest metrics replace earlier metrics. The earlier metrics are still updated but not
exported any more. vLLM treats its own metrics in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvoffload.model.wire import Tier
from kvoffload.telemetry.catalogue import CATALOGUE, Kind, Metric
from kvoffload.telemetry.payload import entries, split_labels

_STANDARD: Mapping[Kind, type] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
_exported: dict[str, Any] = {}


class Families:
    """Exports all metrics of the catalogue for the engines of a front end.

    All series exist from the start, except those of a lower tier, which are created by the first message about this
    tier.

    Args:
        classes: for each metric class of the Prometheus client, the class to use instead.
        label_names: the names of the engine's labels, which come before kvoffload's labels.
        engine_labels: the values of these labels, by the engine's number.
    """

    def __init__(
        self,
        classes: Mapping[type, Callable[..., Any]],
        label_names: Sequence[str],
        engine_labels: Mapping[int, Sequence[object]],
    ) -> None:
        self._engine_labels = engine_labels
        self._metrics: dict[str, Any] = {
            metric.name: _make(classes[_STANDARD[metric.kind]], metric, (*label_names, *metric.label_names))
            for metric in CATALOGUE
        }
        for engine in engine_labels:
            self._create_series(engine, set())

    def observe(self, payload: Mapping[str, Any], engine: int) -> None:
        """Add a message's changes to the metrics.

        Unknown names and labels are ignored, so that a message of another version cannot stop the front end.
        """
        if engine not in self._engine_labels:
            return
        if states := payload.get("kvoffload_tier_state"):
            self._create_series(engine, {Tier(split_labels(joined)[0]) for joined in states})
        for metric, joined, value in entries(payload):
            labels = split_labels(joined)
            if len(labels) != len(metric.labels):
                continue
            series = self._series(engine, metric.name, labels)
            if metric.kind is Kind.COUNTER:
                series.inc(value)
            elif metric.kind is Kind.GAUGE:
                series.set(value)
            else:
                for sample in value:
                    series.observe(sample)

    def _create_series(self, engine: int, tiers: Set[Tier]) -> None:
        for metric in CATALOGUE:
            for labels in metric.series_with(tiers):
                self._series(engine, metric.name, labels)

    def _series(self, engine: int, name: str, labels: tuple[str, ...]) -> Any:  # noqa: ANN401  # an instance of a class that was passed in
        return self._metrics[name].labels(*self._engine_labels[engine], *labels)


def _make(cls: Callable[..., object], metric: Metric, label_names: tuple[str, ...]) -> object:
    """Create a metric. It replaces any metric of the same name that this process exports."""
    options: dict[str, object] = {
        "name": metric.name,
        "documentation": metric.help,
        "labelnames": list(label_names),
    }
    if metric.kind is Kind.GAUGE:
        options["multiprocess_mode"] = "mostrecent"
    if metric.kind is Kind.HISTOGRAM:
        options["buckets"] = list(metric.buckets)
    if metric.name in _exported:
        with suppress(KeyError):  # the metric is missing if the registry was cleared
            REGISTRY.unregister(_exported.pop(metric.name))
    made = cls(**options)
    if isinstance(made, Counter | Gauge | Histogram):
        _exported[metric.name] = made
    return made
