"""Lower tiers: does the disk or the remote tier work, what does it bring, and what does it cost."""

from __future__ import annotations

from collections.abc import Callable

from dashboards.generate import units
from dashboards.generate.colours import COLOURS
from dashboards.generate.promql import (
    SERIES,
    copy_speed,
    each,
    growth,
    one,
    open_jobs,
    quantile,
    rate,
    series,
    share,
    total,
    values_of,
)
from dashboards.generate.words import Board, Kind, Panel, Query, Row

_TIER, _DISK = "$tier", "disk"  # the chosen tier, and the tier of panels that only the disk has
_WAYS = ("store", "load")
_BYTES, _ASK = "kvoffload_transfer_bytes_total", "kvoffload_remote_ask_seconds"
_FETCHED = series("kvoffload_fetched_tokens_total", tier=_TIER)
_WRITTEN, _READ = (series(_BYTES, tier=_TIER, direction=way) for way in _WAYS)
_PREFILL_RATE = series("kvoffload_prefill_tokens_per_second")
_STATES = values_of("kvoffload_tier_state", "state")


def _worst_state() -> Query:
    """The number of the worst state that any of the chosen engines is in."""
    numbered = [
        f"{number} * max({series('kvoffload_tier_state', tier=_TIER, state=name)})"
        for number, name in enumerate(_STATES)
    ]
    expr = " or ".join(f"({state} > 0)" for state in reversed(numbered[1:])) + " or vector(0)"
    return Query(expr, "state", expects=SERIES)


def _percentiles(name: str) -> tuple[Query, ...]:
    return tuple(
        one(quantile(at, name, tier=_TIER, direction=way), f"{way} {words}", SERIES)
        for way in _WAYS
        for at, words in ((0.5, "p50"), (0.99, "p99"))
    )


def _outcomes(way: str) -> Query:
    selected = series("kvoffload_tier_blocks_total", tier=_TIER, direction=way)
    names = values_of("kvoffload_tier_blocks_total", "outcome")
    return Query(rate(selected, "outcome"), "{{outcome}}", names, SERIES)


def _not_delivered() -> str:
    failed, rest = (
        rate(series("kvoffload_tier_blocks_total", tier=_TIER, direction="load", outcome=outcomes))
        for outcomes in ("failed|corrupt", "done")
    )
    return share(failed, rest)


def _under_way(way: str) -> Query:
    scheduled, ended = (
        total(series(name, tier=_TIER, direction=way))
        for name in ("kvoffload_tier_scheduled_blocks_total", "kvoffload_tier_blocks_total")
    )
    return one(f"{scheduled} - {ended}", way, SERIES)


def _found(of: Callable[[str], str]) -> str:
    found, missing = (
        of(series("kvoffload_remote_asked_blocks_total", answer=answer)) for answer in ("found", "missing")
    )
    return share(found, missing)


def _disk_bytes(slots: str) -> str:
    slot_bytes = series("kvoffload_slot_bytes", tier=_DISK)
    return f"sum(({slots}) * on (instance, engine) group_left () ({slot_bytes}))"


_GLANCE = Row(
    "At a glance, over the time range",
    (
        Panel(
            "State of the tier",
            "The worst state of the chosen engines now. Off: neither disk_path nor remote_url names it. Opening: a disk's files are "
            "being made, the weights digested or the index read; a remote tier was not reached yet. Failing: calls fail; a "
            "remote tier is tried again after 1 s, 2 s, and up to 60 s.",
            "FAILING, CLOSED, or opening for minutes: KVOffloadDiskFailing, KVOffloadDiskClosed, KVOffloadDiskNotOpened and "
            "KVOffloadRemoteFailing in the runbook. The engine goes on without the tier.",
            units.COUNT,
            (_worst_state(),),
            Kind.NUMBER,
            width=4,
            limits=tuple((number, COLOURS[state]) for number, state in enumerate(_STATES)),
            texts={
                str(number): state.upper() if state in ("failing", "closed") else state
                for number, state in enumerate(_STATES)
            },
        ),
        Panel(
            "Tokens from the tier",
            "Prompt tokens of hits that were fetched from the tier, and so neither recomputed nor still in host memory.",
            "0 while `Lookups that missed, by cause` has on_disk or in_remote: fetches fail or come too late; see `Fetches by "
            "outcome`.",
            units.TOKENS,
            (one(growth(_FETCHED), "load", SERIES),),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Prefill saved by the tier",
            "Seconds that computing the tokens from the tier would have taken, at the engines' measured rates. An estimate.",
            "below the time that requests waited for fetches and, with a remote tier, for asking: the tier costs more than it "
            "brings; raise spill_after_hits or share_after_hits, or leave the tier out.",
            units.SECONDS,
            (
                one(
                    f"sum(sum without (tier) (increase({_FETCHED}[$__range])) / ({_PREFILL_RATE} > 0)) or vector(0)",
                    "saved",
                    SERIES,
                ),
            ),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Written",
            "Bytes written to the tier. They wear a disk: compare with what its maker allows in its life.",
            "far above `Read`: blocks are written that are not found again; raise spill_after_hits or share_after_hits.",
            units.BYTES,
            (one(growth(_WRITTEN), "store", SERIES),),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Read",
            "Bytes read from the tier.",
            "0 for days: working sets fit in host memory, or prompts do not return.",
            units.BYTES,
            (one(growth(_READ), "load", SERIES),),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Read for each byte written",
            "How often a written byte was read. One engine reads what another has written to a remote tier, so choose all engines "
            "that share it.",
            "far below 0.1 for days: most of what is written is not found again. Raise spill_after_hits or share_after_hits, or "
            "give a larger disk_bytes where blocks are evicted before they return.",
            units.COUNT,
            (one(f"{growth(_READ)} / ({growth(_WRITTEN)} > 0)", "load", SERIES),),
            Kind.NUMBER,
            width=4,
        ),
    ),
)

_COPIES = Row(
    "Copies between host and tier: a store is a spill, a load is a fetch",
    (
        Panel(
            "Bytes to and from the tier",
            "All ranks together.",
            "stores without loads for hours, on all engines that share the tier: see `Read for each byte written`.",
            units.BYTES_PER_SECOND,
            (each(_BYTES, "direction", SERIES, tier=_TIER),),
        ),
        Panel(
            "Speed of the tier while copying",
            "Bytes per second of the time in which a rank copied.",
            "far below what the disk or the network does on an idle machine: something else uses it, the disk wears out "
            "(KVOffloadDiskSlow in the runbook), or blocks are small.",
            units.BYTES_PER_SECOND,
            tuple(copy_speed(_TIER, way, SERIES) for way in _WAYS),
        ),
        Panel(
            "Engines by state of the tier",
            "Engines in each state. Each engine has a circuit breaker of its own.",
            "failing on one engine: its disk or its network; on all: the remote tier.",
            units.COUNT,
            (each("kvoffload_tier_state", "state", SERIES, tier=_TIER),),
            Kind.STACK,
        ),
        Panel(
            "Fetches by outcome",
            "Blocks to be read from the tier, by how that ended. Requests recompute blocks that did not come.",
            "failed, corrupt, abandoned: KVOffloadDiskFailing, KVOffloadDiskCorrupt, KVOffloadRemoteFailing and "
            "KVOffloadRemoteCorrupt in the runbook. failed while a remote tier is open: blocks that it no longer has.",
            units.BLOCKS_PER_SECOND,
            (_outcomes("load"),),
            Kind.STACK,
        ),
        Panel(
            "Fetched blocks that did not come",
            "Of the blocks that were fetched, the share that the tier did not deliver: evicted since, on a node that is gone, in a "
            "call that failed, or not what was written.",
            "above 0.1: KVOffloadRemoteUntrue or KVOffloadDiskFailing in the runbook.",
            units.SHARE,
            (one(_not_delivered(), "loads failed", SERIES),),
            maximum=1.0,
        ),
        Panel(
            "Spills by outcome",
            "Blocks to be written to the tier, by how that ended.",
            "failed: the tier is full, may not be written or is broken, see the log and KVOffloadRemoteNotWritten in the runbook. "
            "cancelled: a reset came.",
            units.BLOCKS_PER_SECOND,
            (_outcomes("store"),),
            Kind.STACK,
        ),
        Panel(
            "Time of a copy with the tier",
            "Percentiles, per rank and job. They come from buckets, so they are coarse.",
            "loads of seconds: long prefixes on a slow disk or network. Requests wait for them.",
            units.SECONDS,
            _percentiles("kvoffload_transfer_seconds"),
        ),
        Panel(
            "Time in the tier's queue",
            "Percentiles of the time before a copy begins. Fetches come before spills.",
            "loads wait long: more requests return at once than the tier can serve.",
            units.SECONDS,
            _percentiles("kvoffload_transfer_queue_seconds"),
        ),
        Panel(
            "Blocks under way to and from the tier",
            "Blocks that were scheduled and have no outcome yet.",
            "not 0 on an idle engine for longer than the tier's time limit: a call hangs (see `Open jobs with the disk`), or the "
            "counters are wrong (report it).",
            units.BLOCKS,
            tuple(_under_way(way) for way in _WAYS),
        ),
    ),
)

_DISK_ONLY = Row(
    "Only of the disk: its slots and its jobs",
    (
        Panel(
            "Disk slots by state, and the capacity",
            "Slots of the ranks' files. A full disk is normal: the least recently used blocks are evicted.",
            "quarantined: writes that hang may still change these slots; they are used again after a restart. Far below the "
            "capacity for days: what repeats fits.",
            units.BLOCKS,
            (
                each("kvoffload_slots", "state", SERIES, tier=_DISK),
                one(total(series("kvoffload_capacity_slots", tier=_DISK)), "capacity", SERIES),
            ),
            Kind.STACK,
            width=6,
        ),
        Panel(
            "Disk bytes",
            "Bytes of the slots that hold a block, and of all.",
            "the capacity is below what was set: the smallest rank's file counts, and a file that cannot be made leaves the disk "
            "opening.",
            units.BYTES,
            (
                one(
                    _disk_bytes(series("kvoffload_slots", tier=_DISK, state="ready|pinned|filling")),
                    "used",
                    SERIES,
                ),
                one(_disk_bytes(series("kvoffload_capacity_slots", tier=_DISK)), "capacity", SERIES),
            ),
            width=6,
        ),
        Panel(
            "Disk evictions by cause",
            "Blocks that left the disk. space is normal once it is full.",
            "corrupt: KVOffloadDiskCorrupt in the runbook.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_evicted_blocks_total", "cause", SERIES, tier=_DISK),),
            Kind.STACK,
            width=6,
        ),
        Panel(
            "Open jobs with the disk",
            "Jobs that have not ended on every rank, by state.",
            "load submitted only grows: the disk hangs.",
            units.JOBS,
            (open_jobs(_DISK),),
            Kind.STACK,
            width=6,
        ),
    ),
)

_REMOTE_ONLY = Row(
    "Only of the remote tier: each arriving request asks it once",
    (
        Panel(
            "Blocks asked for, by answer",
            "found and missing are the remote tier's answers; none: the call failed, took too long, or was not made.",
            "none: calls fail before the breaker opens; see the log's `remote_fails` and KVOffloadRemoteFailing in the runbook.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_remote_asked_blocks_total", "answer", SERIES),),
            Kind.STACK,
            width=6,
        ),
        Panel(
            "Found of what was asked for",
            "The share of the answered blocks that the remote tier said it had.",
            "near 0 on all engines: prompts do not repeat between engines, requests are routed by prefix already, or engines do not "
            "meet (other weights, settings or versions).",
            units.SHARE,
            (one(_found(rate), "found", SERIES),),
            width=6,
            maximum=1.0,
        ),
        Panel(
            "Time of a call that asks",
            "Percentiles of calls that were answered. Each request waits for one, also where nothing is found.",
            "p99 above 0.1 s: see KVOffloadRemoteSlow in the runbook.",
            units.SECONDS,
            tuple(
                one(quantile(at, _ASK), name, SERIES) for at, name in ((0.5, "ask p50"), (0.99, "ask p99"))
            ),
            width=6,
        ),
        Panel(
            "Time that requests wait for asking",
            "Seconds per second in calls that ask, all requests together.",
            "a large part of `Prefill saved by the tier`: the tier answers slowly, or has little of what is asked for.",
            units.SECONDS_PER_SECOND,
            (one(rate(series(_ASK, "_sum")), "waited", SERIES),),
            width=6,
        ),
    ),
)

LOWER_TIERS = Board(
    "tiers",
    "kvoffload: Lower tiers",
    "Does the disk or the remote tier work, what does it bring, and what does it cost?",
    (_GLANCE, _COPIES, _DISK_ONLY, _REMOTE_ONLY),
    tiers=values_of("kvoffload_tier_state", "tier"),
)
