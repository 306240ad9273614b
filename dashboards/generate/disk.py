"""Disk: does the tier below the host work, what does it bring, and what does it cost."""

from __future__ import annotations

from dashboards.generate import tiers, units
from dashboards.generate.promql import SERIES, each, growth, one, rate, series, total
from dashboards.generate.words import Board, Kind, Panel, Query, Row
from kvoffload.telemetry.catalogue import BY_NAME

_DISK = "disk"
_SLOT_BYTES = series("kvoffload_slot_bytes", tier=_DISK)
_FETCHED = series("kvoffload_fetched_tokens_total", tier=_DISK)
_WRITTEN, _READ = (series(tiers.BYTES, tier=_DISK, direction=way) for way in ("store", "load"))


def _bytes(slots: str) -> str:
    return f"sum(({slots}) * on (instance, engine) group_left () ({_SLOT_BYTES}))"


def _open_jobs() -> Query:
    labels = {label.name: label.values for label in BY_NAME["kvoffload_open_jobs"].labels}
    names = tuple(f"{way} {state}" for way in labels["direction"] for state in labels["state"])
    expr = f"sum by (direction, state) ({series('kvoffload_open_jobs', tier=_DISK)})"
    return Query(expr, "{{direction}} {{state}}", names, SERIES)


_GLANCE = Row(
    "At a glance, over the time range",
    (
        Panel(
            "Disk",
            "The worst state of the chosen engines' disks now. Off: no disk_path is set. Opening: files are being made, weights "
            "digested or the index read.",
            "FAILING, CLOSED, or opening for long: KVOffloadDiskFailing, KVOffloadDiskClosed and KVOffloadDiskNotOpened in the "
            "runbook. The engine goes on without the disk.",
            units.COUNT,
            (tiers.worst_state(_DISK),),
            Kind.NUMBER,
            width=4,
            limits=tiers.STATE_LIMITS,
            texts=tiers.STATE_TEXTS,
        ),
        Panel(
            "Tokens from the disk",
            "Prompt tokens of hits that were fetched from the disk, and so neither recomputed nor still in host memory.",
            "0 while `Lookups that missed, by cause` has on_disk: fetches fail or come too late; see `Fetches by outcome`.",
            units.TOKENS,
            (one(growth(_FETCHED), "disk", SERIES),),
            Kind.NUMBER,
            width=5,
        ),
        Panel(
            "Written",
            "Bytes written to the disk. They wear it: compare with what its maker allows in its life.",
            "far above `Read`: blocks are written that are not found again; raise spill_after_hits.",
            units.BYTES,
            (one(growth(_WRITTEN), "store", SERIES),),
            Kind.NUMBER,
            width=5,
        ),
        Panel(
            "Read",
            "Bytes read from the disk.",
            "0 for days: working sets fit in host memory, or prompts do not return.",
            units.BYTES,
            (one(growth(_READ), "load", SERIES),),
            Kind.NUMBER,
            width=5,
        ),
        Panel(
            "Written for each byte read",
            "What one byte that was found again cost the disk in writes.",
            "far above 10: raise spill_after_hits, or give a larger disk_bytes where blocks are evicted before they return.",
            units.COUNT,
            (one(f"{growth(_WRITTEN)} / ({growth(_READ)} > 0)", "store", SERIES),),
            Kind.NUMBER,
            width=5,
        ),
    ),
)

_USE = Row(
    "What it holds",
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
        ),
        Panel(
            "Disk bytes",
            "Bytes of the slots that hold a block, and of all.",
            "the capacity is below what was set: the smallest rank's file counts, and a file that cannot be made leaves the disk "
            "opening.",
            units.BYTES,
            (
                one(
                    _bytes(series("kvoffload_slots", tier=_DISK, state="ready|pinned|filling")),
                    "used",
                    SERIES,
                ),
                one(_bytes(series("kvoffload_capacity_slots", tier=_DISK)), "capacity", SERIES),
            ),
        ),
        Panel(
            "Disk evictions by cause",
            "Blocks that left the disk. space is normal once it is full.",
            "corrupt: KVOffloadDiskCorrupt in the runbook.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_evicted_blocks_total", "cause", SERIES, tier=_DISK),),
            Kind.STACK,
        ),
    ),
)

_COPIES = Row(
    "Copies between host and disk: a store is written, a load is read",
    (
        Panel(
            "Bytes to and from the disk",
            "All ranks together.",
            "stores without loads for hours: see `Written for each byte read`.",
            units.BYTES_PER_SECOND,
            (each(tiers.BYTES, "direction", SERIES, tier=_DISK),),
        ),
        Panel(
            "Speed of the disk while copying",
            "Bytes per second of the time in which a rank copied.",
            "far below what `fio` with direct I/O of 1 MiB measures on an idle machine: something else uses the disk, or it wears out. In the runbook: "
            "KVOffloadDiskSlow.",
            units.BYTES_PER_SECOND,
            (tiers.speed(_DISK, "store"), tiers.speed(_DISK, "load")),
        ),
        Panel(
            "Time that requests wait for fetches",
            "Seconds per second, all requests together. They are part of the waiting in `Seconds saved and lost`.",
            "more than the prefill that it saves: the disk is slow or overloaded.",
            units.SECONDS_PER_SECOND,
            (one(rate(series("kvoffload_load_wait_seconds_total", reason="fetch")), "waited", SERIES),),
        ),
        Panel(
            "Fetches by outcome",
            "Blocks to be read from the disk, by how that ended.",
            "failed, corrupt, abandoned: KVOffloadDiskFailing and KVOffloadDiskCorrupt in the runbook. Requests recompute these "
            "blocks.",
            units.BLOCKS_PER_SECOND,
            (tiers.outcomes(_DISK, "load"),),
            Kind.STACK,
        ),
        Panel(
            "Spills by outcome",
            "Blocks to be written to the disk, by how that ended.",
            "failed: the disk is full or broken, see the log. cancelled: a reset came.",
            units.BLOCKS_PER_SECOND,
            (tiers.outcomes(_DISK, "store"),),
            Kind.STACK,
        ),
        Panel(
            "Open jobs with the disk",
            "Jobs that have not ended on every rank, by state.",
            "load submitted only grows: the disk hangs.",
            units.JOBS,
            (_open_jobs(),),
            Kind.STACK,
        ),
        Panel(
            "Time of a copy with the disk",
            "Percentiles, per rank and job. They come from buckets, so they are coarse.",
            "loads of seconds: long prefixes on a slow disk. Requests wait for them.",
            units.SECONDS,
            tiers.quantiles(_DISK, tiers.COPY),
        ),
        Panel(
            "Time in the disk's queue",
            "Percentiles of the time before a copy begins. Fetches come before spills.",
            "loads wait long: more requests return at once than the disk can serve.",
            units.SECONDS,
            tiers.quantiles(_DISK, tiers.QUEUE),
        ),
        Panel(
            "Blocks under way to and from the disk",
            "Blocks that were scheduled and have no outcome yet.",
            "not 0 on an idle engine: a call hangs (see `Open jobs with the disk`), or the counters are wrong (report it).",
            units.BLOCKS,
            tiers.under_way(_DISK),
        ),
    ),
)

DISK = Board(
    "disk",
    "kvoffload: Disk",
    "Does the disk below the host work, what does it bring, and what does it cost?",
    (_GLANCE, _USE, _COPIES),
)
