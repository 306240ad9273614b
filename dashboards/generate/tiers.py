"""Queries that the boards of the tiers below the host share."""

from __future__ import annotations

from dashboards.generate.colours import COLOURS
from dashboards.generate.promql import SERIES, one, quantile, rate, series
from dashboards.generate.words import Query
from kvoffload.model.causes import TierOutcome
from kvoffload.telemetry.labels import TierState

BYTES, COPY, QUEUE = (
    "kvoffload_transfer_bytes_total",
    "kvoffload_transfer_seconds",
    "kvoffload_transfer_queue_seconds",
)
_WAYS = ("store", "load")
STATES = tuple(state.value for state in TierState)
STATE_LIMITS = tuple((number, COLOURS[state]) for number, state in enumerate(STATES))
STATE_TEXTS = {
    str(number): state.upper() if state in ("failing", "closed") else state
    for number, state in enumerate(STATES)
}


def worst_state(tier: str) -> Query:
    """The number of the worst state that any of the chosen engines is in."""
    numbered = [
        f"{number} * max({series('kvoffload_tier_state', tier=tier, state=name)})"
        for number, name in enumerate(STATES)
    ]
    expr = " or ".join(f"({one} > 0)" for one in reversed(numbered[1:])) + " or vector(0)"
    return Query(expr, "state", expects=SERIES)


def quantiles(tier: str, name: str) -> tuple[Query, ...]:
    """Percentiles of a histogram of copies, by direction."""
    return tuple(
        one(quantile(at, name, tier=tier, direction=way), f"{way} {words}", SERIES)
        for way in _WAYS
        for at, words in ((0.5, "p50"), (0.99, "p99"))
    )


def speed(tier: str, way: str) -> Query:
    """Bytes per second of the time in which a rank copied."""
    busy = rate(series(COPY, "_sum", tier=tier, direction=way))
    return one(f"{rate(series(BYTES, tier=tier, direction=way))} / ({busy} > 0)", way, SERIES)


def outcomes(tier: str, way: str) -> Query:
    """Blocks that were to be copied, by how that ended."""
    selected = series("kvoffload_tier_blocks_total", tier=tier, direction=way)
    names = tuple(outcome.value for outcome in TierOutcome)
    return Query(rate(selected, "outcome"), "{{outcome}}", names, SERIES)


def under_way(tier: str) -> tuple[Query, ...]:
    """Blocks that were scheduled and have no outcome yet."""
    return tuple(
        one(
            f"sum({series('kvoffload_tier_scheduled_blocks_total', tier=tier, direction=way)})"
            f" - sum({series('kvoffload_tier_blocks_total', tier=tier, direction=way)})",
            way,
            SERIES,
        )
        for way in _WAYS
    )
