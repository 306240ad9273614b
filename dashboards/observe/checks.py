"""Evaluates queries in Prometheus, and checks the results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dashboards.generate.boards import BOARDS, Expect, Panel, Query
from dashboards.generate.promql import substitute
from dashboards.observe.prometheus import ObserveError, Prometheus, Series, wait_for

Ask = Callable[[str], list[Series]]
_ENGINE_PROBE = 'count({__name__=~"vllm:.+"})'
_IDLE = ("node",)  # the demo's engine has no neighbour, so ratios and speeds of this tier have no series


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking one query.

    Args:
        where: the dashboard, panel and tier, or the rule, to which the query belongs.
        expr: the query that Prometheus evaluated.
        series: the number of series in the result.
        is_active: whether the result has a value other than 0.
        problem: the reason why the result is wrong; empty if the result is right.
    """

    where: str
    expr: str
    series: int
    is_active: bool
    problem: str = ""


def wait_for_scrape(prometheus: Prometheus, targets: Sequence[str]) -> None:
    """Wait until Prometheus has scraped all targets once more.

    Prometheus scrapes for the first time about 5 s after its start.

    Raises:
        ObserveError: Prometheus did not scrape a target in time.
    """
    begun = time.time()

    def are_scraped() -> bool:
        seen = prometheus.query("timestamp(up) and up == 1")
        return set(targets) <= {one.labels["instance"] for one in seen if one.values[0] > begun}

    wait_for(f"a scrape of {', '.join(targets)}", are_scraped)


def check_panels(prometheus: Prometheus, start: float, end: float) -> Iterator[Finding]:
    """Evaluate the queries of all panels as Grafana would, for each value of the variable `tier`.

    Rates cover the whole time range. So the results depend only on the first and the last scrape, and a busy machine
    may miss some of the other scrapes.
    """
    has_vllm = bool(prometheus.query(_ENGINE_PROBE))
    seconds = math.ceil(end - start)
    over_range = partial(prometheus.query_range, start=end - seconds, end=end)
    at_end = partial(prometheus.query, at=end)
    for board in BOARDS:
        for panel in board.panels:
            ask = at_end if panel.is_instant else over_range
            for query in panel.queries:
                for tier in board.tiers if "$tier" in query.expr else ("",):
                    where = f"{board.name}: {panel.title}{tier and f', {tier}'}"
                    expr = substitute(query.expr, f"{seconds}s", f"{seconds}s", tier)
                    may_lack = tier in _IDLE or (query.is_of_engine and not has_vllm)
                    yield _check(ask, where, expr, partial(_problem, panel, query, may_lack))


def check_rules(prometheus: Prometheus) -> Iterator[Finding]:
    """Yield a finding for each rule: a rule must be healthy, and a recording rule must have a result."""
    for rule in prometheus.rules():
        problem = "" if rule["health"] == "ok" else f"{rule['health']}: {rule.get('lastError', '')}"
        found = prometheus.query(rule["name"] if rule["type"] == "recording" else rule["query"])
        if rule["type"] == "recording" and not found:
            problem = problem or "it has recorded nothing"
        yield Finding(f"rule {rule['name']}", rule["query"], len(found), _is_active(found), problem)


def firing(prometheus: Prometheus) -> list[str]:
    """Return the names of all firing alerts."""
    return sorted({one.labels["alertname"] for one in prometheus.query('ALERTS{alertstate="firing"}')})


def _check(ask: Ask, where: str, expr: str, problem_of: Callable[[list[Series]], str]) -> Finding:
    try:
        found = ask(expr)
    except ObserveError as error:
        return Finding(where, expr, 0, False, str(error))
    return Finding(where, expr, len(found), _is_active(found), problem_of(found))


def _problem(panel: Panel, query: Query, may_lack: bool, found: list[Series]) -> str:
    is_active = _is_active(found)
    if not found:
        return "" if may_lack else "no series"
    if query.expects is Expect.ACTIVITY and not is_active and not query.is_of_engine:
        return "nothing but 0 while there was work"
    if query.expects is Expect.ZERO and is_active:
        return "something other than 0"
    if panel.names and query.names and len(found) > len(query.names):
        named = {value for one in found for label, value in one.labels.items() if label in query.legend}
        return f"{len(found)} series, but only {len(query.names)} names ({', '.join(sorted(named))})"
    return ""


def _is_active(found: Sequence[Series]) -> bool:
    return any(value and not math.isnan(value) for one in found for value in one.values)
