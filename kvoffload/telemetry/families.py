"""The catalogue's metrics as ordinary Prometheus metrics, of classes that the engine chooses.

A process may create the metrics several times, for example for a second engine or logger, but the registry accepts each
name only once. So the newest metrics replace earlier metrics in the registry. The earlier metrics still accept updates.
vLLM treats its own metrics in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload.telemetry.catalogue import CATALOGUE, Kind, Metric
from kvoffload.telemetry.payload import entries, split_labels

_STANDARD: Mapping[Kind, type] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
_exported: dict[str, Any] = {}


class Families:
    """Exports all metrics of the catalogue for the engines of a front end.

    All series exist from the start, except the series of a lower tier. The first message about a lower tier creates the
    tier's series.

    Args:
        classes: for each metric class of the Prometheus client, the class to use instead, such as one of vLLM's.
        label_names: the names of the engine's labels, which precede kvoffload's labels.
        engine_labels: the values of the engine's labels, by the engine's number.
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

        Unknown metrics, labels and engines are ignored, because the message may come from another version of kvoffload.
        """
        if engine not in self._engine_labels:
            return
        if states := payload.get("kvoffload_tier_state"):
            named = {split_labels(joined)[0] for joined in states if joined}
            self._create_series(engine, {tier for tier in LOWER_TIERS if tier.value in named})
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
    """Create a metric, and replace an earlier metric of the same name in the registry."""
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
        with suppress(KeyError):  # raised if the registry was cleared
            REGISTRY.unregister(_exported.pop(metric.name))
    made = cls(**options)
    if isinstance(made, Counter | Gauge | Histogram):
        _exported[metric.name] = made
    return made
