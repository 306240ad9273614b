"""Replaces Grafana's variables."""

from __future__ import annotations

from dashboards.generate.promql import VARIABLES


def substitute(expr: str, rate_interval: str, time_range: str, tier: str = ".*") -> str:
    """Return PromQL without Grafana's variables.

    Raises:
        ValueError: a variable is not known.
    """
    values = {"$__rate_interval": rate_interval, "$__range": time_range, '"$tier"': f'"{tier}"'}
    values |= {f'"${name}"': '".*"' for name in VARIABLES}
    for name, value in values.items():
        expr = expr.replace(name, value)
    if "$" in expr:
        raise ValueError(f"a variable is left in {expr}")
    return expr
