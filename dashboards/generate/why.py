"""Why: why lookups missed, why blocks were not stored, and how host memory is used."""

from __future__ import annotations

from dashboards.generate import units
from dashboards.generate.promql import ENGINE, SERIES, each, of_engine, one, rate, series, total
from dashboards.generate.words import Board, Kind, Panel, Query, Row
from kvoffload.model.causes import MissCause

_CAUSES = "|".join(cause.value for cause in MissCause if cause is not MissCause.BEHIND_MISS)
_AVOIDABLE = "evicted|declined_host_full|declined_lease_limit|declined_stalled|stalled|lost|store_failed|load_failed|corrupt"
_DECLINED = "stale|not_hashed|host_full|not_ready|lease_limit|stalled|request_gone|lost|failed|abandoned"
_KV_FETCH = ("waiting_to_start", "in_progress", "completed_waiting")
_PIN = series("kvoffload_oldest_pin_timestamp_seconds")
_JOB = series("kvoffload_oldest_job_timestamp_seconds")


def _per(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _missing(whole: str, parts: str) -> str:
    return f"{total(whole)} - {total(parts)}"


_LOOKUPS = Row(
    "Lookups: why they missed",
    (
        Panel(
            "Blocks looked up",
            "Block positions beyond the device's own hit, once per admission.",
            "`Lookups that missed, by cause` shows why blocks missed. No blocks at all: no traffic, or the device holds "
            "everything.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_lookup_blocks_total", "result"),),
            Kind.STACK,
        ),
        Panel(
            "Lookups that missed, by cause",
            "Lookups per second that ended before the prompt's end, by what was wrong with the first missing block. The blocks "
            "behind it cannot be used either.",
            "evicted, declined_host_full: give more host memory. declined_not_ready: host memory was not pinned yet, as after "
            "a start. declined_lease_limit: the device pool is small for so many copies. lost: the engine reused blocks before "
            "they were stored; try store_policy eager. load_declined: hits shorter than min_load_tokens. not_accepted: the "
            "engine took less than was found, as where another connector's hit comes first. stalled: KVOffloadCopiesStalled in "
            "the runbook. no_state: see the row on recurrent states. on_disk, in_remote: it could not be waited for; the next request finds it. "
            "tier_opening: as after a start, see `State of the tier`. never_seen: prompts do not repeat.",
            units.LOOKUPS_PER_SECOND,
            (
                Query(
                    rate(series("kvoffload_miss_blocks_total", cause=_CAUSES), "cause"),
                    "{{cause}}",
                    tuple(_CAUSES.split("|")),
                ),
            ),
            Kind.STACK,
            width=16,
        ),
        Panel(
            "Blocks that missed for avoidable causes",
            "Of all blocks looked up, the share whose miss more memory or fewer failures would have avoided. Blocks behind "
            "them are not counted, so it is a lower bound.",
            "over a few per cent: change what the largest cause in `Lookups that missed, by cause` asks for.",
            units.SHARE,
            (
                one(
                    _per(
                        rate(series("kvoffload_miss_blocks_total", cause=_AVOIDABLE)),
                        rate(series("kvoffload_lookup_blocks_total")),
                    ),
                    "avoidable",
                    SERIES,
                ),
            ),
            width=6,
            maximum=1,
        ),
        Panel(
            "Deferred lookups",
            "Waits that lookups began: another request was loading the same prefix, or blocks were being fetched from a lower "
            "tier.",
            "many others_load for long: loads are slow, see `Loads: time of a copy`. Many fetch: see `Time in the tier's queue`.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_lookups_deferred_total", "reason", SERIES),),
            width=6,
        ),
        Panel(
            "Time that requests wait",
            "Seconds per second, all requests together, for their own load, for another request's load of the same prefix, and "
            "for fetches from a lower tier. It is the waiting in `Seconds saved and lost`.",
            "much fetch: the disk or the network is slow or overloaded, see `Time of a copy with the tier`. Much own_load: see "
            "`Loads: time in the queue`.",
            units.SECONDS_PER_SECOND,
            (each("kvoffload_load_wait_seconds_total", "reason", SERIES),),
            width=6,
        ),
        Panel(
            "Pins dropped",
            "Blocks that a lookup pinned and that were released without a load.",
            "looked_up_again is harmless: requests wait in the queue. not_accepted: the engine takes fewer tokens than it is "
            "offered, as it does where another connector's hit comes first.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_pin_dropped_blocks_total", "cause", SERIES),),
            Kind.STACK,
            width=6,
        ),
    ),
)

_OUTCOMES = Row(
    "Stores and loads: their outcomes",
    (
        Panel(
            "Stores by outcome",
            "Computed blocks offered to the host; each gets one outcome in the end.",
            "not_ready: host memory was still being pinned, as after a start; see `Host memory`. host_full: running copies and "
            "requests use every slot; give more memory. stalled: KVOffloadCopiesStalled in the runbook. stale, lost: the engine "
            "reuses blocks before they are stored. failed, abandoned: KVOffloadStoresFailing in the runbook.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_store_blocks_total", "outcome"),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Loads by outcome",
            "Scheduled loads by how they ended. A load that does not arrive is recomputed.",
            "anything but loaded: KVOffloadLoadsFailing in the runbook; for corrupt, KVOffloadCorruptBlocks.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_load_blocks_total", "outcome"),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Offers declined",
            "Of the offered blocks, the share that was not stored although the host lacked it.",
            "over a few per cent: the largest outcome in `Stores by outcome` says why. Each declined block can be a miss later.",
            units.SHARE,
            (
                one(
                    _per(
                        rate(series("kvoffload_store_blocks_total", outcome=_DECLINED)),
                        rate(series("kvoffload_offered_blocks_total")),
                    ),
                    "declined",
                    SERIES,
                ),
            ),
            width=12,
            maximum=1,
        ),
        Panel(
            "Blocks without an outcome yet",
            "Offers and loads that are still open: they wait, or are being copied.",
            "not 0 on an idle engine: copies hang (see `Open jobs`) or the counters are wrong (report it).",
            units.BLOCKS,
            (
                one(
                    _missing(
                        series("kvoffload_offered_blocks_total"), series("kvoffload_store_blocks_total")
                    ),
                    "open offers",
                    SERIES,
                ),
                one(
                    _missing(
                        series("kvoffload_load_scheduled_blocks_total"), series("kvoffload_load_blocks_total")
                    ),
                    "open loads",
                    SERIES,
                ),
            ),
            width=12,
        ),
    ),
)

_STATES = Row(
    "Recurrent states: models with Mamba, gated delta net or short convolution layers",
    (
        Panel(
            "States stored and loaded",
            "Blocks of recurrent states among those stored and loaded. A hit needs one at its end, of each such group.",
            "loads without states are not possible. No states stored while blocks are: no hit ever will be found; see "
            "`Stores by outcome`.",
            units.BLOCKS_PER_SECOND,
            (
                one(rate(series("kvoffload_state_blocks_total", direction="store")), "states stored", SERIES),
                one(rate(series("kvoffload_state_blocks_total", direction="load")), "states loaded", SERIES),
            ),
            width=12,
        ),
        Panel(
            "Junctions",
            "Shared prefixes that were there but for a state at their end. The engine is asked for it, and the next request "
            "finds it.",
            "asked for and not made: requests end or are preempted before they get there. Many for long, with no_state in "
            "`Lookups that missed, by cause`: prompts share beginnings that differ in length; in long conversations, "
            "--prefix-cache-retention-interval keeps more states.",
            units.EVENTS_PER_SECOND,
            (
                one(rate(series("kvoffload_junctions_asked_total")), "junctions asked for", SERIES),
                one(rate(series("kvoffload_junctions_made_total")), "junctions made", SERIES),
            ),
            width=12,
        ),
    ),
)

_HOST = Row(
    "Host memory",
    (
        Panel(
            "Slots by state, and the capacity",
            "Every slot is in one state; together they are the capacity, which grows while the ranks pin memory. `Host "
            "memory` shows bytes.",
            "pinned or filling close to the capacity: new blocks are declined; give more memory. draining for long: old copies "
            "do not end. quarantined: memory lost until a restart.",
            units.BLOCKS,
            (
                each("kvoffload_slots", "state", tier="host"),
                one(total(series("kvoffload_capacity_slots", tier="host")), "capacity"),
            ),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Evictions by cause",
            "Blocks that left the host. space is normal once it is full.",
            "space, with evicted among the causes of misses: the memory is too small for the prompts that repeat. corrupt, "
            "load_failed, abandoned: KVOffloadLoadsFailing in the runbook.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_evicted_blocks_total", "cause", tier="host"),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Age of the oldest pin and copy",
            "How long the oldest hit has kept its slots from eviction, and how long the oldest copy job has been running; 0 without "
            "one. Abandoned jobs do not count.",
            "minutes for a pin: a request waits in the engine's queue, or the engine did not report its end; "
            "KVOffloadPinHeldLong in the runbook. Over transfer_timeout_s for a copy: the engine does not step, or its thread "
            "hangs; KVOffloadJobStuck.",
            units.SECONDS,
            tuple(
                one(f"max((time() - {since}) * ({since} > bool 0))", name, SERIES)
                for since, name in ((_PIN, "oldest pin"), (_JOB, "oldest job"))
            ),
        ),
        Panel(
            "Stale positions removed",
            "Positions removed from requests' records because the engine had handed their blocks out again: normal with sliding "
            "windows.",
            "nothing to do; if it jumps after an upgrade of the engine, together with stale stores, report it.",
            units.BLOCKS_PER_SECOND,
            (one(rate(series("kvoffload_stale_blocks_zeroed_total")), "stale positions", SERIES),),
        ),
        Panel(
            "Audits",
            "How often the conservation laws were checked: whenever the engine is idle, and on request.",
            "none for long on a busy engine is normal. An audit that finds an error switches offloading off: "
            "KVOffloadDegraded in the runbook.",
            units.EVENTS_PER_SECOND,
            (one(rate(series("kvoffload_audits_total")), "audits", SERIES),),
        ),
    ),
)

_ENGINE = Row(
    "vLLM's own numbers",
    (
        Panel(
            "Preemptions",
            "Requests whose blocks vLLM took back. With offloading, most of these blocks are loaded again.",
            "many: admit fewer requests at a time, or give a larger device cache.",
            units.EVENTS_PER_SECOND,
            (one(rate(of_engine("vllm:num_preemptions_total")), "preemptions", ENGINE),),
            width=12,
        ),
        Panel(
            "Requests that wait for loads",
            "By the stage of their load.",
            "waiting_to_start: no device blocks are free. in_progress for long: see `Loads: time of a copy`. "
            "completed_waiting: the scheduler is busy.",
            units.REQUESTS,
            (
                Query(
                    f"sum by (stage) ({of_engine('vllm:num_requests_kv_fetch_by_stage')})",
                    "{{stage}}",
                    _KV_FETCH,
                    ENGINE,
                ),
            ),
            Kind.STACK,
            width=12,
        ),
    ),
)

WHY = Board(
    "why",
    "kvoffload: Why",
    "Why did lookups miss, why were blocks not stored, and how is host memory used?",
    (_LOOKUPS, _OUTCOMES, _STATES, _HOST, _ENGINE),
)
