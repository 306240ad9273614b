"""Why: why lookups missed, why blocks were not stored, and what became of the host's memory."""

from __future__ import annotations

from dashboards.generate import units
from dashboards.generate.promql import ENGINE, SERIES, ZERO, each, of_engine, one, rate, series, total
from dashboards.generate.words import Board, Kind, Panel, Query, Row

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
    "Lookups: why blocks missed",
    (
        Panel(
            "Blocks looked up",
            "Block positions beyond the device's own hit, once per admission.",
            "see the next panel for the misses; none at all means no traffic, or that the device holds everything.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_lookup_blocks_total", "result"),),
            Kind.STACK,
        ),
        Panel(
            "Misses by cause",
            "The first missing block of a lookup has the cause; those behind it cannot be used (behind_miss).",
            "evicted, declined_host_full: give more host memory. declined_lease_limit: the device pool is small for so "
            "many copies. lost: the engine dropped blocks before they were stored; try store_policy eager. "
            "load_declined: hits shorter than min_load_tokens. not_accepted: the engine took less than was found, as "
            "where another connector's hit comes first. declined_not_ready: host memory was not pinned yet, as after a "
            "start. stalled: see the runbook's KVOffloadCopiesStalled. never_seen: prompts do not repeat. "
            "no_state: see the row on recurrent states.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_miss_blocks_total", "cause"),),
            Kind.STACK,
            width=16,
        ),
        Panel(
            "Lookups spoiled by avoidable causes",
            "Of all blocks looked up, the share whose miss more memory or fewer failures would have avoided. Those "
            "behind them are not counted, so it is a lower bound.",
            "over a few per cent, the largest cause in `Misses by cause` says what to change.",
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
            maximum=1,
        ),
        Panel(
            "Lookups told to wait",
            "Lookups answered with 'not yet', because another request was loading the same prefix, which is loaded once.",
            "many for long: loads are slow, see `Loads: time of a copy` in *Transfers*.",
            units.EVENTS_PER_SECOND,
            (one(rate(series("kvoffload_lookups_deferred_total")), "deferred", SERIES),),
        ),
        Panel(
            "Pins dropped",
            "Blocks that a lookup found and pinned, and that were let go without a load.",
            "looked_up_again is harmless: requests wait in the queue. not_accepted: the engine takes fewer tokens than "
            "it is offered, as it does where another connector's hit comes first.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_pin_dropped_blocks_total", "cause", SERIES),),
            Kind.STACK,
        ),
    ),
)

_OUTCOMES = Row(
    "Stores and loads: what became of them",
    (
        Panel(
            "Stores by outcome",
            "Computed blocks offered to the host; each gets one outcome in the end.",
            "host_full: every slot is in use by running copies and requests; more memory. not_ready: host memory was still "
            "being pinned, as after a start. stalled: see the runbook's KVOffloadCopiesStalled. stale, lost: the engine reuses "
            "blocks before they are stored. failed, abandoned: see the runbook's KVOffloadStoresFailing.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_store_blocks_total", "outcome"),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Loads by outcome",
            "Blocks whose load was binding. A load that did not arrive is recomputed.",
            "anything but loaded: see the runbook's KVOffloadLoadsFailing; corrupt has a paragraph of its own.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_load_blocks_total", "outcome"),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Blocks offered, and scheduled to load",
            "What goes into the two panels above.",
            "offers without stores: see the outcomes. Loads scheduled without any that end: copies hang, see `Open "
            "jobs` in *Transfers*.",
            units.BLOCKS_PER_SECOND,
            (
                one(rate(series("kvoffload_offered_blocks_total")), "offered"),
                one(rate(series("kvoffload_load_scheduled_blocks_total")), "scheduled"),
            ),
        ),
        Panel(
            "Offers declined",
            "Of the offered blocks, the share that was not stored although the host lacked it.",
            "over a few per cent, the largest outcome in `Stores by outcome` says why. Each is a miss of tomorrow.",
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
            maximum=1,
        ),
        Panel(
            "Blocks without an outcome yet",
            "Offers and loads that are still open: they wait, or are being copied.",
            "back at 0 whenever the engine is idle. If not, copies hang (see `Open jobs` in *Transfers*) or the books are "
            "wrong (report it).",
            units.BLOCKS,
            (
                one(
                    _missing(
                        series("kvoffload_offered_blocks_total"), series("kvoffload_store_blocks_total")
                    ),
                    "not settled yet",
                    SERIES,
                ),
                one(
                    _missing(
                        series("kvoffload_load_scheduled_blocks_total"), series("kvoffload_load_blocks_total")
                    ),
                    "not ended yet",
                    SERIES,
                ),
            ),
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
            "`Misses by cause`: prompts share beginnings that differ in length; in long conversations, "
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
    "The host's memory",
    (
        Panel(
            "Slots by state, and the capacity",
            "Every slot is in one state; together they are the capacity, which grows while the ranks pin memory.",
            "pinned or filling close to the capacity: new blocks are declined; more memory. draining for long: old copies "
            "do not end. quarantined: memory lost until a restart.",
            units.BLOCKS,
            (
                each("kvoffload_slots", "state"),
                one(total(series("kvoffload_capacity_slots")), "capacity"),
            ),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Evictions by cause",
            "Blocks that left the host. space is normal once it is full.",
            "space with evicted among the misses' causes: the memory is too small for the prompts that come back. "
            "corrupt, load_failed, abandoned: see the runbook's KVOffloadLoadsFailing.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_evicted_blocks_total", "cause"),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Age of the oldest pin",
            "How long the longest-held hit has kept its slots from eviction; 0 without one.",
            "minutes: a request waits in the engine's queue, or an engine forgot to tell its end. In the runbook: "
            "KVOffloadPinHeldLong.",
            units.SECONDS,
            (one(f"max((time() - {_PIN}) * ({_PIN} > bool 0))", "oldest pin", SERIES),),
            width=8,
        ),
        Panel(
            "Age of the oldest copy",
            "How long the longest-running job of copies has been under way; 0 without one. Those that were abandoned do not "
            "count.",
            "over transfer_timeout_s: the engine does not step, or its thread hangs. In the runbook: KVOffloadJobStuck.",
            units.SECONDS,
            (one(f"max((time() - {_JOB}) * ({_JOB} > bool 0))", "oldest job", SERIES),),
            width=8,
        ),
        Panel(
            "Stale positions struck",
            "Positions struck from requests' records because the engine had handed their blocks out again: normal with "
            "sliding windows.",
            "nothing to do; a jump after an upgrade of the engine, together with stale stores, is worth a report.",
            units.BLOCKS_PER_SECOND,
            (one(rate(series("kvoffload_stale_blocks_zeroed_total")), "stale positions", SERIES),),
            width=8,
        ),
        Panel(
            "Accounts that must be 0",
            "Slots that are in no state, and misses that have no cause.",
            "anything but 0 for longer than a scrape is a bug of ours: report it with the journal. In the runbook: "
            "KVOffloadAccountsWrong.",
            units.BLOCKS,
            (
                one(
                    _missing(series("kvoffload_capacity_slots"), series("kvoffload_slots")),
                    "slots that are nowhere",
                    ZERO,
                ),
                one(
                    _missing(
                        series("kvoffload_lookup_blocks_total", result="miss"),
                        series("kvoffload_miss_blocks_total"),
                    ),
                    "misses without a cause",
                    ZERO,
                ),
            ),
            width=8,
        ),
        Panel(
            "Audits",
            "How often the books were compared: whenever nothing goes on, and when somebody asked.",
            "none for long on a busy engine is normal, since it is never at rest. What an audit finds switches offloading "
            "off: see the runbook's KVOffloadDegraded.",
            units.EVENTS_PER_SECOND,
            (one(rate(series("kvoffload_audits_total")), "audits", SERIES),),
            width=8,
        ),
        Panel(
            "Blocks written off",
            "Blocks of jobs that were abandoned because a copy did not end in time. Their slots are lost until a restart.",
            "any: a device or a driver hangs. In the runbook: KVOffloadJobsAbandoned.",
            units.BLOCKS_PER_SECOND,
            (each("kvoffload_written_off_blocks_total", "direction", SERIES),),
            width=8,
        ),
    ),
)

_ENGINE = Row(
    "What vLLM says",
    (
        Panel(
            "Device blocks in use",
            "The share of vLLM's own KV cache that running requests hold.",
            "close to 1, requests are preempted and blocks are lost before they can be stored.",
            units.SHARE,
            (one(f"max({of_engine('vllm:kv_cache_usage_perc')})", "device blocks in use", ENGINE),),
            maximum=1,
        ),
        Panel(
            "Preemptions",
            "Requests whose blocks vLLM took back. With offloading, most of them come back from the host.",
            "many: fewer requests at a time, or a larger device cache.",
            units.EVENTS_PER_SECOND,
            (one(rate(of_engine("vllm:num_preemptions_total")), "preemptions", ENGINE),),
        ),
        Panel(
            "Requests that wait for loads",
            "By how far the load has come.",
            "waiting_to_start: no device blocks free. in_progress for long: see `Loads: time of a copy` in *Transfers*. "
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
        ),
    ),
)

WHY = Board(
    "why",
    "kvoffload: Why",
    "Why did lookups miss, why were blocks not stored, and what became of the host's memory?",
    (_LOOKUPS, _OUTCOMES, _STATES, _HOST, _ENGINE),
)
