from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dashboards.generate.boards import BOARDS
from dashboards.generate.promql import substitute
from dashboards.observe.checks import Finding, check_panels, check_rules, firing, wait_for_scrape
from dashboards.observe.demo import run_demo
from dashboards.observe.prometheus import ObserveError, Prometheus, run_prometheus, wait_for
from kvoffload.remote.local import free_port
from kvoffload.telemetry.catalogue import CATALOGUE, Kind

pytestmark = [pytest.mark.slow, pytest.mark.tools("prometheus"), pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Observed:
    prometheus: Prometheus
    start: float
    end: float  # A later scrape may fail on a busy machine, and the series would end.
    result: dict[str, Any]
    panels: list[Finding]


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    """Run a demo under Prometheus. The demo starts first and may serve requests before the first scrape."""
    address = f"127.0.0.1:{free_port()}"
    with run_demo(address) as demo, run_prometheus([address]) as prometheus:
        start = time.time()
        wait_for_scrape(prometheus, [address])
        result = demo.result()
        wait_for_scrape(prometheus, [address])
        end = time.time()
        yield Observed(prometheus, start, end, result, list(check_panels(prometheus, start, end)))


def test_every_query_of_every_panel_returns_a_valid_result(observed: Observed) -> None:
    assert observed.result["passed"]
    assert all(tier["read_blocks"] for tier in observed.result["tiers"].values())
    assert [one for one in observed.panels if one.problem] == []
    assert len(observed.panels) == sum(
        len(board.tiers) if "$tier" in query.expr else 1
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
    )


def test_every_rule_is_healthy_and_has_recorded(observed: Observed) -> None:
    def are_evaluated() -> bool:
        return all(rule["health"] == "ok" for rule in observed.prometheus.rules())

    wait_for("every rule to be evaluated", are_evaluated)
    wait_for(
        "every recording rule to record",
        lambda: not [one for one in check_rules(observed.prometheus) if one.problem],
    )


def test_a_healthy_demo_raises_no_alert(observed: Observed) -> None:
    assert firing(observed.prometheus) == []


def test_prometheus_has_every_metric_of_the_catalogue_with_all_its_series(observed: Observed) -> None:
    for metric in CATALOGUE:
        name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.name
        assert len(observed.prometheus.query(name, observed.end)) == max(len(metric.series), 1), name


def test_prometheus_has_the_numbers_that_the_demo_reports(observed: Observed) -> None:
    """The demo's table leaves out the warm-up, which loads no blocks."""
    seen = observed.prometheus.query("sum by (outcome) (kvoffload_load_blocks_total)", observed.end)
    loaded = {one.labels["outcome"]: one.values[0] for one in seen}
    assert {name: count for name, count in loaded.items() if count} == observed.result["offloading"][
        "loaded_blocks"
    ]


def test_a_bad_query_is_an_error_with_its_reason(observed: Observed) -> None:
    with pytest.raises(ObserveError, match="parse error"):
        observed.prometheus.query("rate(")


def test_a_variable_without_a_value_is_an_error() -> None:
    assert substitute('a{instance=~"$instance"}[$__rate_interval]', "5s", "1h") == 'a{instance=~".*"}[5s]'
    assert substitute('a{tier=~"$tier"}', "5s", "1h", "disk") == 'a{tier=~"disk"}'
    with pytest.raises(ValueError, match="left in"):
        substitute("a[$__interval]", "5s", "1h")
