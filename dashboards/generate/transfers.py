"""Transfers: copies, their queues, and what offloading costs the engine."""

from __future__ import annotations

from dashboards.generate import units
from dashboards.generate.promql import SERIES, each, one, quantile, rate, series, total
from dashboards.generate.words import Board, Kind, Panel, Query, Row
from kvoffload.telemetry.catalogue import BY_NAME

_COPY, _QUEUE = "kvoffload_transfer_seconds", "kvoffload_transfer_queue_seconds"


def _buckets(name: str, direction: str) -> Query:
    selected = series(name, "_bucket", direction=direction)
    return Query(f"sum by (le) (increase({selected}[$__rate_interval]))", "{{le}}")


def _quantiles(name: str) -> tuple[Query, ...]:
    return tuple(
        one(quantile(at, name, direction=direction), f"{direction} {words}")
        for direction in ("store", "load")
        for at, words in ((0.5, "half"), (0.99, "99 in 100"))
    )


def _copies() -> Query:
    labels = BY_NAME["kvoffload_transfers_total"].labels
    outcomes = next(label.values for label in labels if label.name == "outcome")
    expr = rate(series("kvoffload_transfers_total"), "outcome")
    return Query(expr, "{{outcome}}", outcomes)


def _open_jobs() -> Query:
    ways, states = (label.values for label in BY_NAME["kvoffload_open_jobs"].labels)
    names = tuple(f"{way} {state}" for way in ways for state in states)
    expr = f"sum by (direction, state) ({series('kvoffload_open_jobs')})"
    return Query(expr, "{{direction}} {{state}}", names, SERIES)


def _while_copying(direction: str) -> Query:
    moved = rate(series("kvoffload_transfer_bytes_total", direction=direction))
    busy = rate(series(_COPY, "_sum", direction=direction))
    return one(f"{moved} / ({busy} > 0)", direction)


_BYTES = Row(
    "Bytes",
    (
        Panel(
            "Bytes copied by way",
            "All ranks together: store is device to host, load is host to device.",
            "loads follow hits; stores follow computed blocks. Stores that stop under load: see `Open jobs`.",
            units.BYTES_PER_SECOND,
            (each("kvoffload_transfer_bytes_total", "direction"),),
        ),
        Panel(
            "Speed while copying",
            "Bytes per second of copying, which is the link's speed as one rank sees it.",
            "far under the link's rate: blocks are small, copies share the link, or host memory is on another node "
            "(NUMA). `kvoffload doctor` measures the link alone.",
            units.BYTES_PER_SECOND,
            (_while_copying("store"), _while_copying("load")),
        ),
        Panel(
            "Copies by outcome",
            "Ranks' parts of jobs that ended.",
            "failed: the device or the link, see the log. corrupt: host memory was changed; see the runbook's "
            "KVOffloadCorruptBlocks.",
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
            "a second band far above the first: copies share the link with stores, or wait for the device. Compare "
            "with the time that computing the same tokens takes, and raise min_load_tokens if loading is slower.",
            units.SECONDS,
            (_buckets(_COPY, "load"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Stores: time of a copy",
            "From a copy's start to its end, per rank and job. Nobody waits for it.",
            "growing: the link is shared or host memory is slow. It matters once stores are declined with lease_limit.",
            units.SECONDS,
            (_buckets(_COPY, "store"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Loads: time in the queue",
            "From submission to the copy's start.",
            "more than the copies take: loads wait for the device or for each other. In the runbook: "
            "KVOffloadLoadsQueue.",
            units.SECONDS,
            (_buckets(_QUEUE, "load"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Stores: time in the queue",
            "From submission to the copy's start: stores wait for the forward pass that writes their blocks.",
            "much more than a step takes: the copying task gets no time, or copies pile up; see `Open jobs`.",
            units.SECONDS,
            (_buckets(_QUEUE, "store"),),
            Kind.HEATMAP,
            width=12,
        ),
        Panel(
            "Time of a copy",
            "Half of the copies, and 99 in 100, took at most this long. Read off buckets, so it is coarse.",
            "see the heatmaps above for the shape behind these numbers.",
            units.SECONDS,
            _quantiles(_COPY),
            width=8,
        ),
        Panel(
            "Time in the queue",
            "Half of the jobs, and 99 in 100, waited at most this long.",
            "see the heatmaps above for the shape behind these numbers.",
            units.SECONDS,
            _quantiles(_QUEUE),
            width=8,
        ),
        Panel(
            "Open jobs",
            "Jobs that have not ended on every rank, by state.",
            "submitted that only grows: copies do not end. abandoned: they were abandoned and their memory is lost; see "
            "the runbook's KVOffloadJobsAbandoned.",
            units.JOBS,
            (_open_jobs(),),
            Kind.STACK,
            width=8,
        ),
        Panel(
            "Room for stores",
            "Bytes of stores that may be in flight, over the most that ever may; of the ranks the least. It moves as stores end, "
            "and stays where it was while there are none.",
            "low while stores run and loads do not: someone else uses the link. Low under loads is as it should be; "
            "stores declined with lease_limit are the price.",
            units.SHARE,
            (one(f"min({series('kvoffload_store_bound_ratio')})", "room for stores"),),
            width=12,
            maximum=1.0,
        ),
        Panel(
            "Jobs abandoned",
            "Jobs with a copy that did not end within transfer_timeout_s. Requests recompute; the memory is written off.",
            "any: a device or a driver hangs. In the runbook: KVOffloadJobsAbandoned.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_abandoned_jobs_total", "direction", SERIES),),
            width=12,
        ),
        Panel(
            "Device blocks under abandoned copies",
            "Blocks that the engine cannot use until copies which were abandoned have ended after all.",
            "any: a device or a driver hangs. Over an eighth of the device pool, or after three such jobs in a row, no new "
            "copy is begun. In the runbook: KVOffloadCopiesStalled.",
            units.BLOCKS,
            (one(total(series("kvoffload_abandoned_device_blocks")), "under abandoned copies", SERIES),),
            width=12,
        ),
        Panel(
            "Copies stalled",
            "1 where no new copy is begun, because copies do not end; of the engines chosen the worst.",
            "1: as on the left. It is 0 again by itself when enough of them have ended after all.",
            units.COUNT,
            (one(f"max({series('kvoffload_copies_stalled')})", "copies stalled", SERIES),),
            width=12,
        ),
    ),
)

_COST = Row(
    "What it costs the engine, and who watches",
    (
        Panel(
            "Hooks by kind",
            "Seconds per second that the engine's thread spent in each hook.",
            "the highest one says where to look: lookup and allocated grow with prompts, step with blocks per step, "
            "start_loads with blocks per load. In the runbook: KVOffloadHooksSlow.",
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
            "Slowest hooks",
            "99 in 100 steps spent at most this long in the hook.",
            "over a millisecond at small load: the machine's cores are taken, often by the engine's own processes.",
            units.SECONDS,
            (
                Query(
                    quantile(0.99, "kvoffload_hook_seconds", "hook"),
                    "{{hook}}",
                    BY_NAME["kvoffload_hook_seconds"].labels[0].values,
                ),
            ),
            width=12,
        ),
        Panel(
            "Events dropped",
            "Events that an observer did not get, because its feed was full. Counters never drop.",
            "what that observer tells has holes: the journal of a busy engine needs a faster disk.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_bus_dropped_total", "subscriber", SERIES),),
            Kind.STACK,
        ),
        Panel(
            "Observers removed",
            "Observers and counters that raised and were taken off the bus.",
            "any is a bug: the log has the traceback. If it is counters, metrics stand still from then on.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_bus_removed_total", "subscriber", SERIES),),
            Kind.STACK,
        ),
        Panel(
            "Journal and spans not written",
            "The journal's first write error ends its file; the ring in memory goes on. Spans that the collector did not take are lost, later ones are sent.",
            "for the journal, free space on the disk of journal_path and restart the engine; for spans, see whether the collector at otlp_endpoint answers.",
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
    "How fast are copies, what waits for what, and what does it cost the engine?",
    (_BYTES, _LATENCY, _COST),
)
