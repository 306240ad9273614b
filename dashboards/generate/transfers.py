"""Transfers: copies between device and host, their queues, and the cost to the engine."""

from __future__ import annotations

from dashboards.generate import units
from dashboards.generate.promql import (
    copy_speed,
    each,
    each_quantile,
    one,
    open_jobs,
    rate,
    series,
    values_of,
)
from dashboards.generate.words import Board, Kind, Panel, Query, Row

_HOST = "host"
_COPY, _QUEUE = "kvoffload_transfer_seconds", "kvoffload_transfer_queue_seconds"


def _buckets(name: str, direction: str) -> Query:
    selected = series(name, "_bucket", tier=_HOST, direction=direction)
    return Query(f"sum by (le) (increase({selected}[$__rate_interval]))", "{{le}}")


def _copies() -> Query:
    expr = rate(series("kvoffload_transfers_total", tier=_HOST), "outcome")
    return Query(expr, "{{outcome}}", values_of("kvoffload_transfers_total", "outcome"))


_BYTES = Row(
    "Bytes",
    (
        Panel(
            "Bytes copied by direction",
            "All ranks together: store is device to host, load is host to device.",
            "loads follow hits, stores follow computed blocks. Stores that stop under load: see `Open jobs`.",
            units.BYTES_PER_SECOND,
            (each("kvoffload_transfer_bytes_total", "direction", tier=_HOST),),
        ),
        Panel(
            "Speed while copying",
            "Bytes per second of copy time: the link's speed as one rank sees it.",
            "far below the link's rate: blocks are small, copies share the link, or host memory is on another NUMA node. "
            "`kvoffload gpu-check --only speeds` measures the link of an idle GPU.",
            units.BYTES_PER_SECOND,
            (copy_speed(_HOST, "store"), copy_speed(_HOST, "load")),
        ),
        Panel(
            "Copies by outcome",
            "Copies of single ranks, by how they ended.",
            "failed: the device or the link, see the log. corrupt: host memory changed; KVOffloadCorruptBlocks in the runbook.",
            units.COPIES_PER_SECOND,
            (_copies(),),
            Kind.STACK,
        ),
    ),
)

_LATENCY = Row(
    "Time of a copy, and time before it",
    (
        Panel(
            "Loads: time of a copy",
            "From a copy's start to its end, per rank and job. A request waits for it.",
            "a second band far above the first: loads share the link with stores, or wait for the device. Compare with the "
            "time that computing the same tokens takes (`Break-even length`), and raise min_load_tokens if loading is slower.",
            units.SECONDS,
            (_buckets(_COPY, "load"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Stores: time of a copy",
            "From a copy's start to its end, per rank and job. No request waits for it.",
            "it grows: the link is shared or host memory is slow. It matters once stores are declined with lease_limit, see "
            "`Stores by outcome`.",
            units.SECONDS,
            (_buckets(_COPY, "store"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Loads: time in the queue",
            "From submission to the copy's start.",
            "longer than the copies: loads wait for the device or for each other. In the runbook: "
            "KVOffloadLoadsQueue.",
            units.SECONDS,
            (_buckets(_QUEUE, "load"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Stores: time in the queue",
            "From submission to the copy's start: stores wait for the forward pass that writes their blocks.",
            "much longer than a step: the transfer coroutine gets no processor time, or copies pile up; see `Open jobs`.",
            units.SECONDS,
            (_buckets(_QUEUE, "store"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Open jobs",
            "Jobs that have not ended on every rank, by state.",
            "submitted only grows: copies do not end. abandoned: copies did not end in time and their memory is lost; "
            "KVOffloadJobsAbandoned in the runbook.",
            units.JOBS,
            (open_jobs(_HOST),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Room for stores",
            "The current limit on store bytes in flight as a share of its maximum, on the slowest rank. It is halved when stores "
            "are slow or run beside loads, then recovers; it does not change while no store ends.",
            "low while no loads run: something else uses the link. Low beside loads is intended; stores declined with "
            "lease_limit are the price.",
            units.SHARE,
            (one(f"min({series('kvoffload_store_bound_ratio')})", "room for stores"),),
            width=12,
            maximum=1.0,
        ),
    ),
)

_COST = Row(
    "Cost to the engine",
    (
        Panel(
            "Hooks by kind",
            "Seconds per second that the engine's thread spent in each hook.",
            "the largest says where to look: lookup and allocated grow with prompts, step with blocks per step, "
            "report with copied blocks. In the runbook: KVOffloadHooksSlow.",
            units.SHARE,
            (
                Query(
                    rate(series("kvoffload_hook_seconds", "_sum"), "hook"),
                    "{{hook}}",
                    values_of("kvoffload_hook_seconds", "hook"),
                ),
            ),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Hooks, p99",
            "The 99th percentile of the time that a step spends in each hook.",
            "over a millisecond at low load: other processes use the cores, often the engine's own.",
            units.SECONDS,
            (each_quantile(0.99, "kvoffload_hook_seconds", "hook"),),
            width=12,
        ),
    ),
)

TRANSFERS = Board(
    "transfers",
    "kvoffload: Transfers",
    "How fast are copies, what do they wait for, and what do they cost the engine?",
    (_BYTES, _LATENCY, _COST),
)
