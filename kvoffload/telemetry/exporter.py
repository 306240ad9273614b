"""Prometheus families, built from plain numbers at a scrape, so that counting costs no library call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoffload.telemetry import catalogue
from kvoffload.telemetry.catalogue import CATALOGUE, Kind
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.gauges import GaugeSnapshot, GaugeSource
from kvoffload.telemetry.snapshot import Distribution, Labels, Snapshot

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class KVOffloadCollector(Collector):
    """The catalogue's families for one engine.

    Args:
        counters: of that engine.
        gauges: the state; without it, gauges are 0.
    """

    def __init__(self, counters: Counters, gauges: GaugeSource | None = None) -> None:
        self._counters = counters
        self._gauges = gauges

    def describe(self) -> Iterator[Metric]:
        """Yield the families' names, so that a registry refuses a second collector of the same names."""
        return map(_family, CATALOGUE)

    def collect(self) -> Iterator[Metric]:
        """Yield every family with all its series."""
        counted = self._counters.snapshot()
        state = self._gauges.gauges() if self._gauges else GaugeSnapshot()
        asked = state.numbers()
        for metric in CATALOGUE:
            family = _family(metric)
            _fill(family, metric, counted, asked)
            yield family


def _family(metric: catalogue.Metric) -> Family:
    labels = metric.label_names
    if metric.kind is Kind.COUNTER:
        return CounterMetricFamily(metric.name, metric.help, labels=labels)
    if metric.kind is Kind.GAUGE:
        return GaugeMetricFamily(metric.name, metric.help, labels=labels)
    return HistogramMetricFamily(metric.name, metric.help, labels=labels)


def _fill(
    family: Family,
    metric: catalogue.Metric,
    counted: Snapshot,
    asked: Mapping[str, Mapping[Labels, float]],
) -> None:
    if isinstance(family, HistogramMetricFamily):
        for labels, series in counted.distributions[metric.name].items():
            family.add_metric(labels, _cumulate(metric.buckets, series), series.total)
        return
    numbers = asked[metric.name] if metric.name in asked else counted.counts[metric.name]
    for labels in metric.series or numbers:
        family.add_metric(labels, numbers.get(labels, 0))


def _cumulate(bounds: tuple[float, ...], series: Distribution) -> list[tuple[str, float]]:
    names = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(series.counts), strict=True))
