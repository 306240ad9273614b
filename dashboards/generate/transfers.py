"""Transfers: copies between device and host, their queues, and the cost to the engine."""

from __future__ import annotations

from dashboards.generate import units
from dashboards.generate.promql import SERIES, each, each_quantile, one, quantile, rate, series, total
from dashboards.generate.words import Board, Kind, Panel, Query, Row
from kvoffload.telemetry.catalogue import BY_NAME

_HOST = "host"
_COPY, _QUEUE = "kvoffload_transfer_seconds", "kvoffload_transfer_queue_seconds"


def _buckets(name: str, direction: str) -> Query:
    selected = series(name, "_bucket", tier=_HOST, direction=direction)
    return Query(f"sum by (le) (increase({selected}[$__rate_interval]))", "{{le}}")


def _quantiles(name: str) -> tuple[Query, ...]:
    return tuple(
        one(quantile(at, name, tier=_HOST, direction=direction), f"{direction} {words}")
        for direction in ("store", "load")
        for at, words in ((0.5, "p50"), (0.99, "p99"))
    )


def _copies() -> Query:
    labels = BY_NAME["kvoffload_transfers_total"].labels
    outcomes = next(label.values for label in labels if label.name == "outcome")
    expr = rate(series("kvoffload_transfers_total", tier=_HOST), "outcome")
    return Query(expr, "{{outcome}}", outcomes)


def _open_jobs() -> Query:
    labels = {label.name: label.values for label in BY_NAME["kvoffload_open_jobs"].labels}
    names = tuple(f"{way} {state}" for way in labels["direction"] for state in labels["state"])
    expr = f"sum by (direction, state) ({series('kvoffload_open_jobs', tier=_HOST)})"
    return Query(expr, "{{direction}} {{state}}", names, SERIES)


def _while_copying(direction: str) -> Query:
    moved = rate(series("kvoffload_transfer_bytes_total", tier=_HOST, direction=direction))
    busy = rate(series(_COPY, "_sum", tier=_HOST, direction=direction))
    return one(f"{moved} / ({busy} > 0)", direction)


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
            (_while_copying("store"), _while_copying("load")),
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
            "Time of a copy",
            "Percentiles of the time of a copy. They come from buckets, so they are coarse.",
            "the heatmaps above, `Loads: time of a copy` and `Stores: time of a copy`, show the distribution.",
            units.SECONDS,
            _quantiles(_COPY),
            width=8,
        ),
        Panel(
            "Time in the queue",
            "Percentiles of the time before a copy starts. They come from buckets, so they are coarse.",
            "the heatmaps above, `Loads: time in the queue` and `Stores: time in the queue`, show the distribution.",
            units.SECONDS,
            _quantiles(_QUEUE),
            width=8,
        ),
        Panel(
            "Open jobs",
            "Jobs that have not ended on every rank, by state.",
            "submitted only grows: copies do not end. abandoned: copies did not end in time and their memory is lost; "
            "KVOffloadJobsAbandoned in the runbook.",
            units.JOBS,
            (_open_jobs(),),
            Kind.STACK,
            width=8,
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
        Panel(
            "Jobs abandoned",
            "Jobs with a copy that did not end within transfer_timeout_s. Requests recompute; the memory is written off.",
            "any: the device or its driver hangs. In the runbook: KVOffloadJobsAbandoned.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_abandoned_jobs_total", "direction", SERIES),),
            width=12,
        ),
        Panel(
            "Device blocks under abandoned copies",
            "Blocks that the engine cannot use until abandoned copies end.",
            "any: the device or its driver hangs. Over an eighth of the device pool, or after three such jobs in a row, no new "
            "copy starts. In the runbook: KVOffloadCopiesStalled.",
            units.BLOCKS,
            (one(total(series("kvoffload_abandoned_device_blocks")), "under abandoned copies", SERIES),),
            width=12,
        ),
        Panel(
            "Copies stalled",
            "1 while any of the chosen engines starts no new copy, because copies do not end.",
            "1: see `Device blocks under abandoned copies`. It returns to 0 by itself when enough of the copies have ended.",
            units.COUNT,
            (one(f"max({series('kvoffload_copies_stalled')})", "copies stalled", SERIES),),
            width=12,
        ),
    ),
)

_COST = Row(
    "Cost to the engine, and observers",
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
                    BY_NAME["kvoffload_hook_seconds"].labels[0].values,
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
        Panel(
            "Events dropped",
            "Events that an observer missed, because its feed was full. Counters never miss any.",
            "that observer's output is not complete: the journal of a busy engine needs a faster disk.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_bus_dropped_total", "subscriber", SERIES),),
            Kind.STACK,
        ),
        Panel(
            "Observers removed",
            "Observers and counters that raised an exception and were removed.",
            "any is a bug: the log has the traceback. If it is counters, metrics no longer change.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_bus_removed_total", "subscriber", SERIES),),
            Kind.STACK,
        ),
        Panel(
            "Journal and spans not written",
            "The journal's first write error ends its file; the journal in memory goes on. Spans that the collector did not take "
            "are lost, later ones are sent.",
            "for the journal, free space on the disk of journal_path and restart the engine; for spans, check that the collector "
            "at otlp_endpoint answers.",
            units.EVENTS_PER_SECOND,
            (
                one(rate(series("kvoffload_journal_write_errors_total")), "journal write errors", SERIES),
                one(rate(series("kvoffload_span_export_errors_total")), "spans not sent", SERIES),
            ),
        ),
    ),
)

TRANSFERS = Board(
    "transfers",
    "kvoffload: Transfers",
    "How fast are copies, what do they wait for, and what do they cost the engine?",
    (_BYTES, _LATENCY, _COST),
)
