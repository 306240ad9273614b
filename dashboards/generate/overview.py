"""Overview: which engine is in trouble, is offloading worth it, and is it healthy."""

from __future__ import annotations

from dashboards.generate import units
from dashboards.generate.colours import GREEN, GREY, ORANGE, RED
from dashboards.generate.promql import (
    ENGINE,
    ENGINE_LABELS,
    SERIES,
    VARIABLES,
    ZERO,
    alerts,
    each,
    each_quantile,
    growth,
    of_engine,
    one,
    quantile_of,
    rate,
    series,
    share,
)
from dashboards.generate.words import Board, Kind, Panel, Query, Row
from kvoffload.telemetry.catalogue import HostBytes

_HITS = series("kvoffload_lookup_tokens_total", result="hit")
_MISSES = series("kvoffload_lookup_tokens_total", result="miss")
_FETCHED = series("kvoffload_fetched_tokens_total", tier="disk")
_SAVED = series("kvoffload_prefill_seconds_saved_total")
_WAITED = series("kvoffload_load_wait_seconds_total")
_INTERFERENCE = series("kvoffload_interference_seconds_total")
_LOADED = series("kvoffload_load_blocks_total", outcome="loaded")
_FAILED_LOADS = series("kvoffload_load_blocks_total", outcome="failed|corrupt|abandoned")
_FAILED_STORES = series("kvoffload_store_blocks_total", outcome="failed|abandoned")
_NEGATIVE = f"max({series('kvoffload_net_benefit_negative')})"
_NOT_MEASURED, _NO, _YES = "-1", "1", "0"
_HOST_FIRST_TOKEN = series("kvoffload_first_token_seconds", "_bucket", found="host")


def _of_queries(hits: str, queries: str) -> str:
    return f"{rate(of_engine(hits))} / ({rate(of_engine(queries))} > 0)"


def _by_engine(expr: str) -> str:
    return f"sum by ({ENGINE_LABELS}) ({expr})"


def _added(name: str) -> str:
    return growth(series(name), ENGINE_LABELS)


def _host_bytes(state: HostBytes) -> str:
    return _by_engine(series("kvoffload_host_bytes", state=state.value))


_DEVICE_SHARE = _of_queries("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
_HOST_SHARE = _of_queries("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total")
_FIRST_TOKEN = of_engine("vllm:time_to_first_token_seconds_bucket")
_END_TO_END = of_engine("vllm:e2e_request_latency_seconds_bucket")
_NET = f"{growth(_SAVED, ENGINE_LABELS)} - {growth(_WAITED, ENGINE_LABELS)} - {growth(_INTERFERENCE, ENGINE_LABELS)}"
_HIT_RATIO = (
    f"{growth(_HITS, ENGINE_LABELS)} / ({growth(series('kvoffload_lookup_tokens_total'), ENGINE_LABELS)} > 0)"
)
_TTFT_BY_ENGINE = f"histogram_quantile(0.99, {growth(_HOST_FIRST_TOKEN, f'le, {ENGINE_LABELS}')})"
_ENGINE_COLUMNS = {label: name for name, label in VARIABLES.items()}
_ON_OFF = {"0": "on", "1": "OFF"}
_FIRING = ((0, GREEN), (1, RED))
_FAULTS = {
    "jobs lost": _added("kvoffload_abandoned_jobs_total"),
    "blocks lost": _added("kvoffload_written_off_blocks_total"),
    "blocks held": _by_engine(series("kvoffload_abandoned_device_blocks")),
    "copies stalled": _by_engine(series("kvoffload_copies_stalled")),
    "observers lost": _added("kvoffload_bus_removed_total"),
    "events lost": _added("kvoffload_bus_dropped_total"),
    "journal errors": _added("kvoffload_journal_write_errors_total"),
    "spans lost": _added("kvoffload_span_export_errors_total"),
    "slots missing": (
        f"{_by_engine(series('kvoffload_capacity_slots'))} - {_by_engine(series('kvoffload_slots'))}"
    ),
    "causes missing": (
        f"{_by_engine(series('kvoffload_lookup_blocks_total', result='miss'))}"
        f" - {_by_engine(series('kvoffload_miss_blocks_total'))}"
    ),
}

_ENGINES = Row(
    "Engines, over the time range",
    (
        Panel(
            "Engines",
            "One row an engine. Net seconds are prefill time saved less waiting and interference; the first-token time is the "
            "p99 of requests with hits on the host; memory ready is the reserved part of the memory that was set.",
            "sort by a column to find the engine that differs, and choose it in the filters above. OFF: see "
            "`Switched off by`. Memory ready far below 100 % long after a start: KVOffloadMemoryIncomplete in the runbook.",
            units.FLAG,
            (
                Query(
                    f"max by ({ENGINE_LABELS}) ({series('kvoffload_degraded')})",
                    "offloading",
                    expects=SERIES,
                    limits=_FIRING,
                    texts=_ON_OFF,
                ),
                Query(_HIT_RATIO, "hit ratio", unit=units.SHARE),
                Query(_NET, "net seconds saved", unit=units.SECONDS),
                Query(_TTFT_BY_ENGINE, "TTFT p99, host hits", unit=units.SECONDS),
                Query(
                    f"{_host_bytes(HostBytes.RESERVED)} / ({_host_bytes(HostBytes.WANTED)} > 0)",
                    "memory ready",
                    unit=units.SHARE,
                ),
                Query(
                    f"{_host_bytes(HostBytes.USED)} / ({_host_bytes(HostBytes.RESERVED)} > 0)",
                    "memory used",
                    unit=units.SHARE,
                ),
                Query(
                    f"{growth(_FAILED_LOADS, ENGINE_LABELS)} + {growth(_FAILED_STORES, ENGINE_LABELS)}",
                    "failed blocks",
                    expects=SERIES,
                    unit=units.COUNT,
                    limits=((0, GREEN), (1, ORANGE)),
                ),
            ),
            Kind.TABLE,
            width=24,
            labels=_ENGINE_COLUMNS,
        ),
    ),
)

_GLANCE = Row(
    "At a glance, over the time range",
    (
        Panel(
            "Offloading",
            "Whether it is on in all chosen engines. Once off, it stays off until the engine restarts; the engine goes on "
            "without it.",
            "find the cause in `Switched off by`, keep the log line `offloading_off` with the journal in it, and restart the "
            "engine when it suits you. In the runbook: KVOffloadDegraded.",
            units.COUNT,
            (Query(f"max({series('kvoffload_degraded')})", "off", expects=SERIES),),
            Kind.NUMBER,
            width=4,
            limits=_FIRING,
            texts=_ON_OFF,
        ),
        Panel(
            "Worth it",
            "Whether more seconds were saved than lost, in the last minutes that could tell; not measured before anything was "
            "loaded.",
            "`Seconds saved and lost` shows what outweighs the savings. In the runbook: KVOffloadNetNegative.",
            units.COUNT,
            (
                Query(
                    f"({_NEGATIVE} and sum({_LOADED}) > 0) or vector({_NOT_MEASURED})",
                    "negative",
                    expects=SERIES,
                ),
            ),
            Kind.NUMBER,
            width=4,
            limits=((-1, GREY), (0, GREEN), (1, RED)),
            texts={_NOT_MEASURED: "not measured", _YES: "yes", _NO: "NO"},
        ),
        Panel(
            "Net seconds saved",
            "Prefill time saved, less the time that requests waited for loads and that copies slowed the engine's steps. An "
            "estimate.",
            "below 0, or far too low for the tokens found: see `Seconds saved and lost`. In the runbook: "
            "KVOffloadNetNegative.",
            units.SECONDS,
            (one(f"{growth(_SAVED)} - {growth(_WAITED)} - {growth(_INTERFERENCE)}", "net"),),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Tokens from the host",
            "Tokens that were loaded instead of recomputed.",
            "0 with traffic: nothing is found again. `Lookups that missed, by cause` shows why.",
            units.TOKENS,
            (one(growth(_HITS), "hit"),),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Hit ratio of the host",
            "Of the tokens that the device did not hold, the share that the host had.",
            "low although prompts repeat: `Lookups that missed, by cause` tells evicted blocks (more memory helps) from "
            "declined ones (the reason helps) and from those never seen before (nothing helps).",
            units.SHARE,
            (one(share(growth(_HITS), growth(_MISSES)), "hit"),),
            Kind.NUMBER,
            width=4,
            maximum=1,
        ),
        Panel(
            "Firing alerts",
            "Alerts of kvoffload's rules for the chosen engines. Always 0 where the rules are not loaded.",
            "each alert carries its paragraph of the runbook and a link to it.",
            units.COUNT,
            (one(alerts(), "alerts", SERIES),),
            Kind.NUMBER,
            width=4,
            limits=_FIRING,
        ),
    ),
)

_WORTH = Row(
    "Is it worth it",
    (
        Panel(
            "Seconds saved and lost",
            "Per second, all requests together: prefill time saved, at the engine's measured rate; time that requests waited "
            "for loads; time that copies cost the engine's steps; and the balance. Estimates.",
            "waiting outweighs saving: hits are too short, so raise min_load_tokens or set it to auto; or loads queue, see "
            "`Loads: time in the queue`. Interference outweighs it: `store_policy: lazy` copies less. In the runbook: "
            "KVOffloadNetNegative.",
            units.SECONDS_PER_SECOND,
            (
                one(rate(_SAVED), "saved"),
                one(rate(_WAITED), "waited"),
                one(rate(_INTERFERENCE), "interference", SERIES),
                one(f"{rate(_SAVED)} - {rate(_WAITED)} - {rate(_INTERFERENCE)}", "net"),
            ),
        ),
        Panel(
            "Break-even length",
            "Hits of at least this many tokens are faster to load than to compute; of disk and remote, what the tier adds to a "
            "hit, fetched and loaded. 0 until measured; 1,000,000 means that no length is.",
            "close to the usual length of hits, loading gains little: loads wait for something (see `Loads: time in the "
            "queue`), or computing is fast. With min_load_tokens at auto, shorter hits are not loaded.",
            units.TOKENS,
            (
                one(f"max({series('kvoffload_break_even_tokens')})", "break-even", SERIES),
                *(
                    one(f"max({series('kvoffload_fetch_break_even_tokens', tier=tier)})", tier, SERIES)
                    for tier in ("disk", "remote")
                ),
            ),
        ),
        Panel(
            "Prefill rate",
            "Tokens that the engine prefills per second of the time that this adds to its steps, as measured for the seconds "
            "saved.",
            "0 with traffic: no prefill step was measured yet, so loads save nothing in the estimate. Unsteady: other work "
            "shares the device, and the estimate follows it.",
            units.TOKENS_PER_SECOND,
            (one(f"min({series('kvoffload_prefill_tokens_per_second')})", "prefill"),),
        ),
        Panel(
            "Prompt tokens looked up",
            "Tokens beyond the device's own hit, by whether the host had them.",
            "only misses: see `Lookups that missed, by cause`. Nothing at all: no requests, or the device holds everything.",
            units.TOKENS_PER_SECOND,
            (each("kvoffload_lookup_tokens_total", "result"),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Hit ratio by tier",
            "The share that each tier had of the tokens it was asked for. The host is asked only for what the device lacks, "
            "and has what was fetched from the disk, which is also shown alone. With vLLM, its own counts are shown too.",
            "our count and vLLM's differ for long: hits are dropped or loads fail, see `Pins dropped` and `Loads by outcome`.",
            units.SHARE,
            (
                one(share(rate(_HITS), rate(_MISSES)), "host"),
                one(
                    f"{rate(_FETCHED)} / (({rate(_HITS)} + {rate(_MISSES)}) > 0)",
                    "disk",
                    SERIES,
                ),
                one(_DEVICE_SHARE, "device", ENGINE),
                one(_HOST_SHARE, "host, as vLLM counts", ENGINE),
            ),
            width=12,
            maximum=1,
        ),
        Panel(
            "Time to first token, p50",
            "The median by what the request's last lookup found: blocks fetched from the disk, on the host, on the device only, or "
            "nothing. Measured "
            "at the next step, so up to one step too long.",
            "requests with hits on the host should be faster than similar ones without. If not, loading is slower than "
            "computing: see `Loads: time of a copy`, and raise min_load_tokens.",
            units.SECONDS,
            (each_quantile(0.5, "kvoffload_first_token_seconds", "found"),),
            width=12,
        ),
        Panel(
            "Time to first token, p99",
            "The 99th percentile by what the request's last lookup found.",
            "host far above nothing: loads wait, see `Loads: time in the queue`. All of them high: the engine is overloaded, "
            "see `Requests running and waiting`.",
            units.SECONDS,
            (each_quantile(0.99, "kvoffload_first_token_seconds", "found"),),
            width=12,
        ),
    ),
)

_SERVER = Row(
    "The server: vLLM's load",
    (
        Panel(
            "Requests running and waiting",
            "Requests in vLLM's batch, and in its queue.",
            "a queue that grows: the server is overloaded, and first tokens wait whatever is found.",
            units.REQUESTS,
            (
                one(f"sum({of_engine('vllm:num_requests_running')})", "running", ENGINE),
                one(f"sum({of_engine('vllm:num_requests_waiting')})", "waiting", ENGINE),
            ),
            width=6,
        ),
        Panel(
            "Tokens per second",
            "Prompt tokens, found ones included, and generated tokens.",
            "prompt tokens fall while requests wait: the server is busy decoding, or loads are slow, see `Loads: time of a "
            "copy`.",
            units.TOKENS_PER_SECOND,
            (
                one(rate(of_engine("vllm:prompt_tokens_total")), "prompt", ENGINE),
                one(rate(of_engine("vllm:generation_tokens_total")), "generated", ENGINE),
            ),
            width=6,
        ),
        Panel(
            "Latency",
            "vLLM's own times over all requests: to the first token, and end to end.",
            "end to end grows while first tokens do not: decoding is slow, see `Hooks by kind`.",
            units.SECONDS,
            (
                one(quantile_of(0.5, _FIRST_TOKEN), "first token p50", ENGINE),
                one(quantile_of(0.99, _FIRST_TOKEN), "first token p99", ENGINE),
                one(quantile_of(0.5, _END_TO_END), "end to end p50", ENGINE),
                one(quantile_of(0.99, _END_TO_END), "end to end p99", ENGINE),
            ),
            width=6,
        ),
        Panel(
            "Device blocks in use",
            "The share of vLLM's own KV cache that running requests hold.",
            "close to 100 %: requests are preempted, and blocks are lost before they can be stored.",
            units.SHARE,
            (one(f"max({of_engine('vllm:kv_cache_usage_perc')})", "device blocks in use", ENGINE),),
            width=6,
            maximum=1,
        ),
    ),
)

_HEALTH = Row(
    "Health",
    (
        Panel(
            "Should be 0",
            "One row an engine, in the time range: jobs with a copy that did not end within transfer_timeout_s, and their blocks, "
            "which are lost until a restart; device blocks that such copies still hold; 1 while no new copy starts because of "
            "them; observers that failed or missed events; what the journal's file and the collector of spans did not take; "
            "slots without a state and misses without a cause.",
            "jobs, blocks, copies: the device or its driver hangs; KVOffloadJobsAbandoned and KVOffloadCopiesStalled in the "
            "runbook. Observers: KVOffloadObserverRemoved, KVOffloadEventsDropped. Journal: free space on the disk of "
            "journal_path. Spans: check that the collector at otlp_endpoint answers. Slots or causes: a bug in kvoffload; "
            "KVOffloadAccountsWrong.",
            units.COUNT,
            tuple(
                Query(expr, name, expects=ZERO, limits=((0, GREEN), (0.01, RED)))
                for name, expr in _FAULTS.items()
            ),
            Kind.TABLE,
            width=24,
            labels=_ENGINE_COLUMNS,
        ),
        Panel(
            "Host memory",
            "Bytes, all ranks together: what was set, what is reserved by now, and what is used.",
            "reserved below wanted long after a start: the ranks still pin memory, or cannot. In the runbook: "
            "KVOffloadMemoryIncomplete, KVOffloadNoCapacity.",
            units.BYTES,
            (each("kvoffload_host_bytes", "state"),),
            width=12,
        ),
        Panel(
            "Switched off by",
            "1 while offloading is off by this cause.",
            "law_broken and handler_raised are bugs in kvoffload: report them with the journal. transfer_dead: a rank's copies "
            "stopped; look for the device's errors in its log. In the runbook: KVOffloadDegraded.",
            units.COUNT,
            (each("kvoffload_degraded", "cause", SERIES),),
            Kind.STACK,
            width=12,
            maximum=1,
        ),
        Panel(
            "Contract violations",
            "Calls of the engine that its contract with connectors does not allow. Each was survived.",
            "a few after an upgrade of the engine: report them. A steady rate costs hits. In the runbook: "
            "KVOffloadEngineSurprises.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_engine_surprises_total", "cause", SERIES),),
            Kind.STACK,
            width=12,
        ),
        Panel(
            "Resets",
            "Resets of the cache: nothing computed before one is found after it.",
            "one that was not expected: see what calls the engine's reset, often a weight update or a sleep.",
            units.EVENTS_PER_SECOND,
            (one(rate(series("kvoffload_resets_total")), "resets", SERIES),),
            width=12,
        ),
        Panel(
            "Versions and settings",
            "What each engine runs, as its labels of kvoffload_info say.",
            "engines of one service differ: they were not restarted after a change.",
            units.FLAG,
            (Query(series("kvoffload_info"), "info"),),
            Kind.TABLE,
            width=24,
            labels={
                **_ENGINE_COLUMNS,
                "version": "kvoffload",
                "engine_name": "engine name",
                "engine_version": "engine version",
                "store_policy": "store_policy",
                "verify": "verify",
                "min_load_tokens": "min_load_tokens",
            },
        ),
    ),
)

OVERVIEW = Board(
    "overview",
    "kvoffload: Overview",
    "Which engine is in trouble, is offloading worth it, and is it healthy?",
    (_ENGINES, _GLANCE, _WORTH, _SERVER, _HEALTH),
)
