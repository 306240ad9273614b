"""Queries over the catalogue's metrics. A name or label that the catalogue lacks raises an error here."""

from __future__ import annotations

from dashboards.generate.words import Expect, Query
from kvoffload.telemetry.catalogue import BY_NAME, Metric

ACTIVITY, SERIES, ZERO, ENGINE = Expect.ACTIVITY, Expect.SERIES, Expect.ZERO, Expect.ENGINE
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
"""The engine's own series that panels join; nothing else outside the catalogue is on a panel."""

VARIABLES = {
    "namespace": "namespace",
    "pod": "pod",
    "instance": "instance",
    "model": "model_name",
    "engine": "engine",
}
"""The dashboards' variables, and the label that each filters by. A label that a server lacks filters nothing."""
ENGINE_LABELS = ", ".join(VARIABLES.values())
"""What tells engines apart."""
_CHOSEN = ", ".join(f'{label}=~"${name}"' for name, label in VARIABLES.items())


def series(name: str, suffix: str = "", **labels: str) -> str:
    """Select a metric of the chosen engines; a label's value may be several, as `a|b`, or the variable `$tier`."""
    for label, values in labels.items():
        if unknown := set(values.split("|")) - {*values_of(name, label), "$tier"}:
            raise ValueError(f"{name} has no {label} {', '.join(sorted(unknown))}")
    chosen = [_CHOSEN, *(f'{label}{_operator(value)}"{value}"' for label, value in labels.items())]
    return f"{name}{suffix}{{{', '.join(chosen)}}}"


def of_engine(name: str) -> str:
    """Select one of the engine's own metrics."""
    if name not in VLLM_SERIES:
        raise ValueError(f"{name} is not among the engine's metrics that are used")
    return f"{name}{{{_CHOSEN}}}"


def alerts() -> str:
    """Count the alerts that fire for the chosen engines."""
    return f'count(ALERTS{{{_CHOSEN}, alertname=~"KVOffload.*", alertstate="firing"}}) or vector(0)'


def total(selected: str) -> str:
    """Sum gauges over everything."""
    return f"sum({selected})"


def rate(selected: str, by: str = "") -> str:
    """Per second, summed over all labels but those in `by`."""
    return f"sum{_grouped(by)} (rate({selected}[$__rate_interval]))"


def growth(selected: str, by: str = "") -> str:
    """What was added in the dashboard's time range."""
    return f"sum{_grouped(by)} (increase({selected}[$__range]))"


def share(part: str, *parts: str) -> str:
    """A part of the sum of `part` and `parts`; nothing where the sum is 0."""
    whole = " + ".join([part, *parts])
    return f"{part} / (({whole}) > 0)"


def quantile(at: float, name: str, by: str = "", **labels: str) -> str:
    """A quantile of a histogram."""
    _metric(name)
    return quantile_of(at, series(name, "_bucket", **labels), by)


def quantile_of(at: float, buckets: str, by: str = "") -> str:
    """A quantile of selected buckets."""
    return f"histogram_quantile({at}, {rate(buckets, f'le, {by}' if by else 'le')})"


def each_quantile(at: float, name: str, label: str) -> Query:
    """A quantile of a histogram by one of its labels: one series a value, named by it."""
    return Query(quantile(at, name, label), f"{{{{{label}}}}}", values_of(name, label))


def each(name: str, label: str, expects: Expect = ACTIVITY, **labels: str) -> Query:
    """A counter's rate, or a gauge, by one of its labels: one series a value, named by it."""
    selected = series(name, **labels)
    counted = name.endswith("_total")
    expr = rate(selected, label) if counted else f"sum by ({label}) ({selected})"
    return Query(expr, f"{{{{{label}}}}}", values_of(name, label), expects)


def copy_speed(tier: str, way: str, expects: Expect = ACTIVITY) -> Query:
    """Bytes per second of the time in which a rank copied."""
    copied = rate(series("kvoffload_transfer_bytes_total", tier=tier, direction=way))
    busy = rate(series("kvoffload_transfer_seconds", "_sum", tier=tier, direction=way))
    return one(f"{copied} / ({busy} > 0)", way, expects)


def open_jobs(tier: str) -> Query:
    """Jobs that have not ended on every rank, by direction and state."""
    name = "kvoffload_open_jobs"
    expr = f"sum by (direction, state) ({series(name, tier=tier)})"
    names = tuple(
        f"{way} {state}" for way in values_of(name, "direction") for state in values_of(name, "state")
    )
    return Query(expr, "{{direction}} {{state}}", names, SERIES)


def values_of(name: str, label: str) -> tuple[str, ...]:
    """Every value that a label of a metric can have."""
    return next(one.values for one in _metric(name).labels if one.name == label)


def one(expr: str, name: str, expects: Expect = ACTIVITY) -> Query:
    """A query with one series, by its name."""
    return Query(expr, name, (name,), expects)


def _metric(name: str) -> Metric:
    if name not in BY_NAME:
        raise ValueError(f"{name} is not in the catalogue")
    return BY_NAME[name]


def _grouped(by: str) -> str:
    return f" by ({by})" if by else ""


def _operator(value: str) -> str:
    return "=~" if "|" in value or "$" in value else "="
