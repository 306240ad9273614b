"""Shared store: is it reached, what does it bring to the engines that share it, and what do they wait for it."""

from __future__ import annotations

from collections.abc import Callable

from dashboards.generate import tiers, units
from dashboards.generate.promql import SERIES, each, growth, one, quantile, rate, series, share
from dashboards.generate.words import Board, Kind, Panel, Query, Row

_REMOTE = "remote"
_ASKED, _ASK = "kvoffload_remote_asked_blocks_total", "kvoffload_remote_ask_seconds"
_FETCHED = series("kvoffload_fetched_tokens_total", tier=_REMOTE)
_WRITTEN, _READ = (series(tiers.BYTES, tier=_REMOTE, direction=way) for way in ("store", "load"))
_RATE = series("kvoffload_prefill_tokens_per_second")


def _engines() -> Query:
    expr = f"sum by (state) ({series('kvoffload_tier_state', tier=_REMOTE)})"
    return Query(expr, "{{state}}", tiers.STATES, SERIES)


def _found(of: Callable[[str], str]) -> str:
    """The share of the answered blocks that the store had."""
    found, missing = (of(series(_ASKED, answer=answer)) for answer in ("found", "missing"))
    return share(found, missing)


def _failed() -> str:
    failed, rest = (
        rate(series("kvoffload_tier_blocks_total", tier=_REMOTE, direction="load", outcome=outcomes))
        for outcomes in ("failed|corrupt", "done")
    )
    return share(failed, rest)


_GLANCE = Row(
    "At a glance, over the time range",
    (
        Panel(
            "Shared store",
            "The worst state of the chosen engines now. Off: no remote_url is set. Opening: the store was not reached yet. Failing: the "
            "circuit breaker is open, and the store is tried again after 1 s, 2 s, and up to 60 s.",
            "FAILING, or opening for minutes: KVOffloadRemoteFailing in the runbook. The engine goes on without the store.",
            units.COUNT,
            (tiers.worst_state(_REMOTE),),
            Kind.NUMBER,
            width=4,
            limits=tiers.STATE_LIMITS,
            texts=tiers.STATE_TEXTS,
        ),
        Panel(
            "Found of what was asked for",
            "Of the blocks that arriving requests asked the store for, the share that it said it had.",
            "near 0 on all engines: prompts do not repeat between engines, requests are routed by prefix already, or engines do not "
            "meet (other weights, settings or versions).",
            units.SHARE,
            (one(_found(growth), "found", SERIES),),
            Kind.NUMBER,
            width=5,
        ),
        Panel(
            "Tokens from the store",
            "Prompt tokens of hits that were fetched from the store: another engine, or an earlier life of this one, has computed them.",
            "0 while `Found of what was asked for` is not: fetches fail; see `Fetches from the store by outcome`.",
            units.TOKENS,
            (one(growth(_FETCHED), "remote", SERIES),),
            Kind.NUMBER,
            width=5,
        ),
        Panel(
            "Prefill saved by the store",
            "Seconds that computing the tokens from the store would have taken, at the engines' measured rates. An estimate.",
            "below `Time that requests wait for asking`: the store costs more than it brings; raise share_after_hits, or leave "
            "remote_url out.",
            units.SECONDS,
            (
                one(
                    f"sum(sum without (tier) (increase({_FETCHED}[$__range])) / ({_RATE} > 0)) or vector(0)",
                    "saved",
                    SERIES,
                ),
            ),
            Kind.NUMBER,
            width=5,
        ),
        Panel(
            "Read for each byte written",
            "Of the chosen engines together: one writes what another reads, so choose all that share a store.",
            "far below 0.1 for days: most of what is written is not found again; raise share_after_hits.",
            units.COUNT,
            (one(f"{growth(_READ)} / ({growth(_WRITTEN)} > 0)", "load", SERIES),),
            Kind.NUMBER,
            width=5,
        ),
    ),
)

_ASKING = Row(
    "Asking: once a request, when it arrives",
    (
        Panel(
            "Blocks asked for, by answer",
            "found and missing are the store's answers; none: the call failed, took too long, or was not made.",
            "none: calls fail before the breaker opens; see the log's `remote_fails` and KVOffloadRemoteFailing in the runbook.",
            units.BLOCKS_PER_SECOND,
            (each(_ASKED, "answer", SERIES),),
            Kind.STACK,
        ),
        Panel(
            "Time of a call that asks",
            "Percentiles of calls that were answered. Each request waits for one, also where nothing is found.",
            "p99 above 0.1 s: see KVOffloadRemoteSlow in the runbook.",
            units.SECONDS,
            tuple(
                one(quantile(at, _ASK), name, SERIES) for at, name in ((0.5, "ask p50"), (0.99, "ask p99"))
            ),
        ),
        Panel(
            "Time that requests wait for asking",
            "Seconds per second in calls that ask, all requests together.",
            "a large part of `Prefill saved by the store`: the store answers slowly, or has little of what is asked for.",
            units.SECONDS_PER_SECOND,
            (one(rate(series(_ASK, "_sum")), "waited", SERIES),),
        ),
    ),
)

_COPIES = Row(
    "Copies between host and store: a store is written, a load is fetched",
    (
        Panel(
            "Bytes to and from the store",
            "All ranks together.",
            "stores without loads on all engines for hours: see `Read for each byte written`.",
            units.BYTES_PER_SECOND,
            (each(tiers.BYTES, "direction", SERIES, tier=_REMOTE),),
        ),
        Panel(
            "Fetches from the store by outcome",
            "Blocks to be read from the store, by how that ended.",
            "failed while the store is open: hints that were untrue, or calls that failed; corrupt: KVOffloadRemoteCorrupt in the "
            "runbook. Requests recompute these blocks.",
            units.BLOCKS_PER_SECOND,
            (tiers.outcomes(_REMOTE, "load"),),
            Kind.STACK,
        ),
        Panel(
            "Fetched blocks that did not come",
            "Of the blocks that the store said it had and that were fetched, the share that it did not deliver: evicted since, on a node "
            "that is gone, in a call that failed, or not what was written.",
            "above 0.1: KVOffloadRemoteUntrue in the runbook.",
            units.SHARE,
            (one(_failed(), "loads failed", SERIES),),
            maximum=1.0,
        ),
        Panel(
            "Writes to the store by outcome",
            "Blocks to be written to the store, by how that ended.",
            "failed: the store is full or refuses writes, see the log. cancelled: a reset came.",
            units.BLOCKS_PER_SECOND,
            (tiers.outcomes(_REMOTE, "store"),),
            Kind.STACK,
        ),
        Panel(
            "Speed of the store while copying",
            "Bytes per second of the time in which a rank copied.",
            "far below the network: the store is busy, or blocks are small. Fetches are worth less then.",
            units.BYTES_PER_SECOND,
            (tiers.speed(_REMOTE, "store"), tiers.speed(_REMOTE, "load")),
        ),
        Panel(
            "Engines by the store's state",
            "Engines in each state. The breaker of an engine is its own: one that does not reach the store says nothing of others.",
            "failing on one engine: its network; on all: the store.",
            units.COUNT,
            (_engines(),),
            Kind.STACK,
        ),
        Panel(
            "Time of a copy with the store",
            "Percentiles, per rank and job. They come from buckets, so they are coarse.",
            "loads of seconds: long prefixes over a slow network. Requests wait for them.",
            units.SECONDS,
            tiers.quantiles(_REMOTE, tiers.COPY),
        ),
        Panel(
            "Time in the store's queue",
            "Percentiles of the time before a copy begins. Fetches come before writes.",
            "loads wait long: more requests return at once than the store can serve.",
            units.SECONDS,
            tiers.quantiles(_REMOTE, tiers.QUEUE),
        ),
        Panel(
            "Blocks under way to and from the store",
            "Blocks that were scheduled and have no outcome yet.",
            "not 0 on an idle engine for longer than remote_timeout_s: the counters are wrong (report it).",
            units.BLOCKS,
            tiers.under_way(_REMOTE),
        ),
    ),
)

REMOTE = Board(
    "remote",
    "kvoffload: Shared store",
    "Is the store that engines share reached, what does it bring, and what do they wait for it?",
    (_GLANCE, _ASKING, _COPIES),
)
