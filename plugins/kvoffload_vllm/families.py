"""The catalogue as ordinary Prometheus metrics, made from the classes that vLLM passes in (its own or Ray's).

A process may make them several times, for a second engine or a second logger, but the registry accepts a name once. So
the metrics are kept: a later caller gets the same objects, and its engines' series restart at 0. An earlier caller with
the same series then updates objects that are no longer exported, so nothing is counted twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvoffload.telemetry.catalogue import CATALOGUE, Kind, Metric
from kvoffload_vllm.payload import entries, split_labels

_STANDARD: Mapping[Kind, type] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
_made: dict[tuple[Callable[..., object], str], tuple[tuple[str, ...], Any]] = {}


class Families:
    """Every metric of the catalogue, with all its series present from the start.

    Args:
        classes: by class of the Prometheus client, the class to use for it.
        label_names: vLLM's labels, which precede ours.
        engine_labels: the values of vLLM's labels for each engine of this front end.
    """

    def __init__(
        self,
        classes: Mapping[type, Callable[..., Any]],
        label_names: Sequence[str],
        engine_labels: Mapping[int, Sequence[object]],
    ) -> None:
        self._engine_labels = engine_labels
        self._children: dict[tuple[int, str, tuple[str, ...]], Any] = {}
        self._metrics: dict[str, Any] = {
            metric.name: _make(classes[_STANDARD[metric.kind]], metric, (*label_names, *metric.label_names))
            for metric in CATALOGUE
        }
        for engine in engine_labels:
            for metric in CATALOGUE:
                for labels in metric.series:
                    self._start(engine, metric.name, labels)

    def observe(self, payload: Mapping[str, Any], engine: int) -> None:
        """Add one message. Unknown names and labels are ignored, so that another version cannot end the front end."""
        if engine not in self._engine_labels:
            return
        for metric, joined, value in entries(payload):
            labels = split_labels(joined)
            if len(labels) != len(metric.labels):
                continue
            key = engine, metric.name, labels
            child: Any = self._children.get(key) or self._start(*key)
            if metric.kind is Kind.COUNTER:
                child.inc(value)
            elif metric.kind is Kind.GAUGE:
                child.set(value)
            else:
                for sample in value:
                    child.observe(sample)

    def _start(self, engine: int, name: str, labels: tuple[str, ...]) -> object:
        values = [*self._engine_labels[engine], *labels]
        metric = self._metrics[name]
        if isinstance(metric, Counter | Gauge | Histogram) and not _is_multiprocess():
            metric.remove(*values)
        child = self._children[engine, name, labels] = metric.labels(*values)
        return child


def _make(cls: Callable[..., object], metric: Metric, label_names: tuple[str, ...]) -> object:
    """Return the metric, a new one or the one this process already has."""
    options: dict[str, object] = {
        "name": metric.name,
        "documentation": metric.help,
        "labelnames": list(label_names),
    }
    if metric.kind is Kind.GAUGE:
        options["multiprocess_mode"] = "mostrecent"
    if metric.kind is Kind.HISTOGRAM:
        options["buckets"] = list(metric.buckets)
    try:
        made = cls(**options)
    except ValueError:
        if (cls, metric.name) not in _made:
            raise  # the name belongs to another package
        names, known = _made[cls, metric.name]
        if names == label_names:
            return known
        REGISTRY.unregister(known)
        made = cls(**options)
    _made[cls, metric.name] = label_names, made
    return made


def _is_multiprocess() -> bool:
    """Whether the client keeps values in files. It cannot remove a series there, so series continue from their last value."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ
