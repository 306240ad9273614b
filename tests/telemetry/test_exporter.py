from __future__ import annotations

import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from kvoffload.model.causes import CopyOutcome, MissCause
from kvoffload.model.errors import ConfigError
from kvoffload.model.events import LookupAnswered, RankReported
from kvoffload.model.ids import JobId, Rank, RequestId
from kvoffload.model.wire import Direction
from kvoffload.telemetry.catalogue import CATALOGUE, Kind, Series
from kvoffload.telemetry.exporter import KVOffloadCollector, serve
from tests.telemetry.fake_source import FakeSource

if TYPE_CHECKING:
    from prometheus_client.core import Metric

STATE: dict[str, Series] = {
    "kvoffload_slots": {("host", "empty"): 3, ("host", "ready"): 2, ("disk", "ready"): 7},
    "kvoffload_capacity_slots": {("host",): 5, ("disk",): 7},
    "kvoffload_oldest_pin_timestamp_seconds": {(): 1700000000.5},
    "kvoffload_degraded": {("invariant_broken",): 1},
    "kvoffload_bus_dropped_total": {("journal",): 6},
    "kvoffload_info": {("0", "e", "1", "eager", "lru", "off", "auto"): 1},
}


def test_the_catalogue_is_well_formed() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.read is not None or metric.kind is not Kind.GAUGE
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")
        assert "|" not in metric.help  # the help is a table cell in dashboards/metrics.md
        assert metric.unit
        assert set(metric.label_names).isdisjoint({"engine", "le", "job", "instance"})


def test_every_series_is_served_from_the_start() -> None:
    served = {
        (sample.name, tuple(value for name, value in sample.labels.items() if name != "le"))
        for family in KVOffloadCollector(FakeSource()).collect()
        for sample in family.samples
    }
    for metric in CATALOGUE:
        suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
        for labels in metric.series:
            assert (metric.name + suffix, labels) in served


def test_counters_and_gauges_are_served() -> None:
    page = page_of(KVOffloadCollector(busy(STATE)))
    for line in [
        'kvoffload_lookup_blocks_total{result="miss"} 2.0',
        'kvoffload_miss_blocks_total{cause="behind_miss"} 1.0',
        'kvoffload_transfer_bytes_total{direction="load",tier="host"} 4096.0',
        'kvoffload_transfer_seconds_bucket{direction="load",le="0.001",tier="host"} 0.0',
        'kvoffload_transfer_seconds_bucket{direction="load",le="0.0025",tier="host"} 1.0',
        'kvoffload_transfer_seconds_bucket{direction="load",le="+Inf",tier="host"} 1.0',
        'kvoffload_transfer_seconds_sum{direction="load",tier="host"} 0.002',
        'kvoffload_slots{state="ready",tier="host"} 2.0',
        'kvoffload_slots{state="pinned",tier="host"} 0.0',
        'kvoffload_capacity_slots{tier="host"} 5.0',
        'kvoffload_slots{state="ready",tier="disk"} 7.0',
        'kvoffload_capacity_slots{tier="disk"} 7.0',
        "kvoffload_oldest_pin_timestamp_seconds 1.7000000005e+09",
        'kvoffload_degraded{cause="invariant_broken"} 1.0',
        'kvoffload_degraded{cause="handler_raised"} 0.0',
        'kvoffload_bus_dropped_total{subscriber="journal"} 6.0',
        'kvoffload_bus_dropped_total{subscriber="other"} 0.0',
    ]:
        assert line in page.splitlines()
    (info,) = [line for line in page.splitlines() if line.startswith("kvoffload_info{")]
    assert 'engine_name="e"' in info
    assert info.endswith("} 1.0")


def test_a_second_collector_in_one_registry_is_refused() -> None:
    registry = registry_of(KVOffloadCollector(FakeSource()))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(KVOffloadCollector(FakeSource()))


@pytest.mark.tools("promtool")
def test_promtool_accepts_the_page() -> None:
    page = page_of(KVOffloadCollector(busy(STATE)))
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False, timeout=30
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture
def url() -> Iterator[str]:
    with serve(registry_of(KVOffloadCollector(busy())), port=0) as running:
        yield running


def test_metrics_are_served_on_loopback_as_text_and_on_request_as_openmetrics(url: str) -> None:
    assert url == f"http://127.0.0.1:{port_of(url)}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert b'kvoffload_lookup_blocks_total{result="miss"} 2.0' in answer.read()
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.read().endswith(b"# EOF\n")


def test_the_server_answers_500_when_a_collector_raises() -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            raise RuntimeError("out of order")

        def describe(self) -> list[Metric]:
            return []

    with serve(registry_of(Broken()), port=0) as running, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(running, timeout=10)
    caught.value.close()
    assert caught.value.code == 500


def test_a_hanging_scraper_delays_no_other_scrape() -> None:
    with socket.socket() as hanging, serve(CollectorRegistry(), port=0) as url:
        hanging.connect(("127.0.0.1", port_of(url)))
        hanging.sendall(b"GET /metr")  # an incomplete request must not keep the server from closing
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200


def answer_to(url: str, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(url)), timeout=10) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(4096), b""))


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda text: b"GET /metrics HTTP/1.0\r\n" + text))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_property_random_requests_do_not_break_the_next_scrape(url: str, request: bytes) -> None:
    with suppress(ConnectionError):
        answer_to(url, request)
    assert b"200 OK" in answer_to(url, b"GET /metrics HTTP/1.0\r\n\r\n")


def test_closing_the_server_frees_its_port() -> None:
    with serve(CollectorRegistry(), port=0) as url:
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port_of(url)), timeout=10)
    with serve(CollectorRegistry(), port=port_of(url)) as again:
        assert again == url


def test_the_error_names_an_unusable_address(url: str) -> None:
    taken = rf"127.0.0.1:{port_of(url)} \(Address already in use\); choose another"
    with pytest.raises(ConfigError, match=taken):
        serve(CollectorRegistry(), port=port_of(url)).__enter__()
    for host, port in [("x" * 64, 0), ("127.0.0.1", 70000), ("192.0.2.1", 0)]:
        with pytest.raises(ConfigError, match=r"cannot be served on .* \(.+\)"):
            serve(CollectorRegistry(), host, port).__enter__()


def busy(state: Mapping[str, Series] | None = None) -> FakeSource:
    source = FakeSource(state)
    source.bus.publish(LookupAnswered(RequestId("a"), 0, 3, 2, 48, 32, MissCause.EVICTED))
    source.bus.publish(RankReported(JobId(1), Rank(0), Direction.LOAD, CopyOutcome.DONE, 4096, 0.0001, 0.002))
    return source


def page_of(collector: KVOffloadCollector) -> str:
    return generate_latest(registry_of(collector)).decode()


def registry_of(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
