"""Adds Grafana's variables to queries, and replaces the variables with values so that Prometheus accepts a query."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvoffload.telemetry.catalogue import BY_NAME

VLLM_SERIES = frozenset(
    (
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:external_prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:generation_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:num_requests_kv_fetch_by_stage",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
    )
)
"""Series of the engine itself that panels use. All other series on panels are in kvoffload's catalogue."""
_VLLM_LABELS = {"stage": ("waiting_to_start", "in_progress", "completed_waiting")}

VARIABLES = {
    "namespace": "namespace",
    "pod": "pod",
    "instance": "instance",
    "model": "model_name",
    "engine": "engine",
}
"""The dashboards' variables, each with the label by which it filters. A server without this label is not filtered."""
ENGINE_LABELS = ", ".join(VARIABLES.values())
"""The names of the labels that distinguish engines."""
_NET = (
    "sum$by (increase(kvoffload_prefill_seconds_saved_total[$window]))"
    " - sum$by (increase(kvoffload_load_wait_seconds_sum[$window]))"
    " - sum$by (increase(kvoffload_interference_seconds_total[$window]))"
)
NET = {
    "$net_per_engine": _NET.replace("$by", " by ($engine_labels)").replace("$window", "$__range"),
    "$net_per_second": _NET.replace("$by", "")
    .replace("increase", "rate")
    .replace("$window", "$__rate_interval"),
    "$net": _NET.replace("$by", "").replace("$window", "$__range"),
}
"""The net benefit (seconds saved minus seconds lost) in PromQL, by the names that panels use for it."""
_CHOSEN = ", ".join(f'{label}=~"${name}"' for name, label in VARIABLES.items())
_SERIES = re.compile(r"((?:kvoffload_|vllm:|ALERTS)\w*)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')


def choose_engines(promql: str) -> str:
    """Return a query that selects only the engines chosen by the dashboard's variables.

    Args:
        promql: the query without filters by engine. It may contain the names in `NET`, and `$engine_labels`, which
            stands for the labels that distinguish engines.

    Raises:
        ValueError: the query selects a series or a label value that does not exist.
    """
    for name, expression in NET.items():
        promql = promql.replace(name, expression)
    return _SERIES.sub(_choose, promql).replace("$engine_labels", ENGINE_LABELS)


def values_of(promql: str, label: str) -> tuple[str, ...]:
    """Return the values that a label can have in a query's result; empty if the catalogue does not list them."""
    found = _SERIES.search(promql)
    assert found is not None, promql
    excluded = {
        value for name, sign, value in _MATCHER.findall(found[2] or "") if (name, sign) == (label, "!=")
    }
    return tuple(value for value in _labels_of(found[1]).get(label, ()) if value not in excluded)


def substitute(expr: str, rate_interval: str, time_range: str, tier: str = ".*") -> str:
    """Replace Grafana's variables in a query with values. All variables that filter engines match every engine.

    Args:
        expr: the query.
        rate_interval: the period of rates, such as `60s`.
        time_range: the length of the time range, such as `60s`.
        tier: the value of the variable `tier`; by default a pattern that matches every tier.

    Raises:
        ValueError: a variable is unknown.
    """
    values = {"$__rate_interval": rate_interval, "$__range": time_range, '"$tier"': f'"{tier}"'}
    values |= {f'"${name}"': '".*"' for name in VARIABLES}
    for name, value in values.items():
        expr = expr.replace(name, value)
    if "$" in expr:
        raise ValueError(f"a variable is left in {expr}")
    return expr


def _choose(found: re.Match[str]) -> str:
    name, labels = found[1], found[2]
    known = _labels_of(name)
    for label, _, values in _MATCHER.findall(labels or ""):
        unknown = set(values.split("|")) - {*known.get(label, ()), "$tier"}
        if unknown and name != "ALERTS":
            raise ValueError(f"{name} has no {label} {', '.join(sorted(unknown))}")
    return f"{name}{{{', '.join(filter(None, (_CHOSEN, labels)))}}}"


def _labels_of(series: str) -> Mapping[str, tuple[str, ...]]:
    """Return the label values that a series can have, by the label's name.

    Raises:
        ValueError: the series does not exist.
    """
    if series == "ALERTS":
        return {}
    if series.startswith("vllm:"):
        if series not in VLLM_SERIES:
            raise ValueError(f"{series} is not among the engine's metrics that are used")
        return _VLLM_LABELS
    metric = BY_NAME.get(series) or BY_NAME.get(re.sub("_(bucket|sum|count)$", "", series))
    if metric is None:
        raise ValueError(f"{series} is not in the catalogue")
    return {label.name: label.values for label in metric.labels}
