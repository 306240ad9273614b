"""Serves all metrics to Prometheus. Only exporting needs the Prometheus client; counting does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoffload.model.errors import ConfigError
from kvoffload.telemetry import catalogue
from kvoffload.telemetry.catalogue import CATALOGUE, Kind
from kvoffload.telemetry.counters import Distribution, Source, all_series

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class KVOffloadCollector(Collector):
    """A Prometheus collector for one engine's metrics.

    Args:
        source: the engine's scheduler side.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        """Yield all metric families without series, so that a registry refuses a second collector."""
        return map(_family, CATALOGUE)

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their series."""
        counters = self._source.counters
        counted = counters.snapshot()
        for metric, series in all_series(counted.counts, self._source.gauges(), counted.distributions):
            family = _family(metric)
            for labels in metric.series_with(counters.tiers) or series:
                if metric.kind is Kind.HISTOGRAM:
                    family.add_metric(labels, _cumulate(metric.buckets, series[labels]), series[labels].total)
                else:
                    family.add_metric(labels, series.get(labels, 0))
            yield family


def _family(metric: catalogue.Metric) -> Any:  # noqa: ANN401  # `add_metric` takes different arguments for each kind
    return _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.label_names)


def _cumulate(bounds: tuple[float, ...], series: Distribution) -> list[tuple[str, float]]:
    names = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(series.counts), strict=True))


# -- over HTTP ----------------------------------------------------------------------------------------------------

DEFAULT_PORT = 9464


@contextmanager
def serve(registry: CollectorRegistry, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> Iterator[str]:
    """Serve a registry's metrics over HTTP until the `with` block ends, and yield the URL. Port 0 means any free port.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    try:
        server, thread = start_http_server(port, host, registry)
    # An invalid host name raises ValueError, an invalid port OverflowError.
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        advice = "choose another address, or port 0 for any free one"
        raise ConfigError([f"metrics cannot be served on {host}:{port} ({reason}); {advice}"]) from error
    try:
        named = f"[{host}]" if ":" in host else host
        yield f"http://{named}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
