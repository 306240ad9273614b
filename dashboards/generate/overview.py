"""Overview: is it worth it, and is it healthy."""

from __future__ import annotations

from dashboards.generate import units
from dashboards.generate.colours import GREEN, RED
from dashboards.generate.promql import (
    ENGINE,
    SERIES,
    each,
    growth,
    of_engine,
    one,
    quantile,
    rate,
    series,
    share,
)
from dashboards.generate.words import Board, Kind, Panel, Query, Row
from kvoffload.model.causes import Found

_HITS = series("kvoffload_lookup_tokens_total", result="hit")
_MISSES = series("kvoffload_lookup_tokens_total", result="miss")
_SAVED = series("kvoffload_prefill_seconds_saved_total")
_WAITED = series("kvoffload_load_wait_seconds_total")
_INTERFERENCE = series("kvoffload_interference_seconds_total")
_FAILED_LOADS = series("kvoffload_load_blocks_total", outcome="failed|corrupt|abandoned")
_FAILED_STORES = series("kvoffload_store_blocks_total", outcome="failed|abandoned")
_ALERTS = 'count(ALERTS{alertname=~"KVOffload.*", alertstate="firing"}) or vector(0)'


def _of_queries(hits: str, queries: str) -> str:
    return f"{rate(of_engine(hits))} / ({rate(of_engine(queries))} > 0)"


_DEVICE_SHARE = _of_queries("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
_HOST_SHARE = _of_queries("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total")
_FIRST_TOKEN = rate(of_engine("vllm:time_to_first_token_seconds_bucket"), "le")

_GLANCE = Row(
    "At a glance, over the time range",
    (
        Panel(
            "Offloading",
            "Whether it is on. Once off, it stays off until the engine starts again; the engine serves on without it.",
            "find the cause in the panel `Switched off by`, keep the log's `offloading_off` line with the journal it "
            "carries, and restart the engine when it suits. In the runbook: KVOffloadDegraded.",
            units.COUNT,
            (Query(f"max({series('kvoffload_degraded')})", "off", expects=SERIES),),
            Kind.NUMBER,
            width=3,
            limits=((0, GREEN), (1, RED)),
            texts={"0": "on", "1": "OFF"},
        ),
        Panel(
            "Worth it",
            "Whether more seconds were saved than lost in the last minutes in which it mattered.",
            "`Seconds saved and lost` tells what outweighs the savings. In the runbook: KVOffloadNetNegative.",
            units.COUNT,
            (Query(f"max({series('kvoffload_net_benefit_negative')})", "negative", expects=SERIES),),
            Kind.NUMBER,
            width=3,
            limits=((0, GREEN), (1, RED)),
            texts={"0": "yes", "1": "NO"},
        ),
        Panel(
            "Seconds saved, net",
            "Prefilling that was not done again, less the time that requests waited for loads and that copies cost the "
            "engine's steps. An estimate.",
            "below 0, or far below the tokens found: see `Seconds saved and lost`. In the runbook: KVOffloadNetNegative.",
            units.SECONDS,
            (one(f"{growth(_SAVED)} - {growth(_WAITED)} - {growth(_INTERFERENCE)}", "net"),),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Prompt tokens found on the host",
            "Tokens that were copied back instead of being computed again.",
            "0 with traffic means that nothing comes back. The dashboard *Why* shows the causes.",
            units.TOKENS,
            (one(growth(_HITS), "hit"),),
            Kind.NUMBER,
            width=4,
        ),
        Panel(
            "Hit ratio of the host",
            "Of the tokens that the device did not hold, the share that the host had.",
            "low although prompts repeat: *Why* tells evicted blocks (more memory helps) from declined ones (the "
            "reason helps) and from those never seen before (nothing helps).",
            units.SHARE,
            (one(share(growth(_HITS), growth(_MISSES)), "hit"),),
            Kind.NUMBER,
            width=4,
            maximum=1,
        ),
        Panel(
            "Bytes brought back",
            "Bytes copied from host to device.",
            "many bytes for few tokens found mean that loads fail or are repeated: see `Loads by outcome` in *Why*.",
            units.BYTES,
            (one(growth(series("kvoffload_transfer_bytes_total", direction="load")), "load"),),
            Kind.NUMBER,
            width=3,
        ),
        Panel(
            "Alerts that fire",
            "Of kvoffload's rules, on all instances. Always 0 where the rules are not loaded.",
            "each alert carries its paragraph of the runbook.",
            units.COUNT,
            (one(_ALERTS, "alerts", SERIES),),
            Kind.NUMBER,
            width=3,
            limits=((0, GREEN), (1, RED)),
        ),
    ),
)

_WORTH = Row(
    "Is it worth it",
    (
        Panel(
            "Seconds saved and lost",
            "Per second: prefilling saved, at the engine's own measured rate; time that requests waited for loads, each "
            "request's added up; time that copies cost the engine's steps; and what is left. Estimates.",
            "waiting outweighs saving: hits are too short, so raise min_load_tokens or set it to auto, or loads queue (see "
            "`Loads: time of a copy` in *Transfers*). Interference does: `store_policy: lazy` copies less. In the "
            "runbook: KVOffloadNetNegative.",
            units.SHARE,
            (
                one(rate(_SAVED), "saved"),
                one(rate(_WAITED), "waited"),
                one(rate(_INTERFERENCE), "interference", SERIES),
                one(f"{rate(_SAVED)} - {rate(_WAITED)} - {rate(_INTERFERENCE)}", "net"),
            ),
        ),
        Panel(
            "Break-even length",
            "Hits from this length on take less time to load than to compute. 0 until measured; a million stands for "
            "no length at all.",
            "near the usual length of hits, loading gains little: loads wait for something (see `Loads: time in the queue` in "
            "*Transfers*), or computing is fast. min_load_tokens at auto follows this line.",
            units.TOKENS,
            (one(f"max({series('kvoffload_break_even_tokens')})", "break-even", SERIES),),
        ),
        Panel(
            "Prefill rate",
            "Tokens that the engine prefills in a second of the time that this adds to its steps, as measured for the "
            "seconds saved.",
            "0 with traffic: no step that prefilled was seen yet, and nothing loaded is priced. Jumping: other work "
            "shares the device, and the seconds saved follow it.",
            units.TOKENS_PER_SECOND,
            (one(f"min({series('kvoffload_prefill_tokens_per_second')})", "prefill"),),
        ),
        Panel(
            "Prompt tokens looked up",
            "Tokens beyond the device's own hit, by whether the host had them. Hits are work not done twice.",
            "only misses: see `Misses by cause` in *Why*. Nothing at all: no requests, or the device holds everything.",
            units.TOKENS_PER_SECOND,
            (each("kvoffload_lookup_tokens_total", "result"),),
            Kind.STACK,
        ),
        Panel(
            "Hit ratio by tier",
            "The share that each tier had of the tokens asked of it. The host is asked only for what the device lacks. "
            "With vLLM, its own counts stand beside ours.",
            "the two views of the host part for long when promised hits are dropped or loads fail: see `Pins dropped` "
            "and `Loads by outcome` in *Why*.",
            units.SHARE,
            (
                one(share(rate(_HITS), rate(_MISSES)), "host"),
                one(_DEVICE_SHARE, "device", ENGINE),
                one(_HOST_SHARE, "host, as the engine counts", ENGINE),
            ),
            maximum=1,
        ),
        Panel(
            "Time to first token",
            "Half of the requests were at least this fast, by what their last lookup found: blocks on the host, on the device "
            "alone, or nothing; up to a step longer than it took. With vLLM, its own figures over all requests stand "
            "beside it: half of them, and 99 in 100.",
            "requests with hits on the host should be faster than those without, of like prompts. If they are not, loads are "
            "slower than computing: see `Loads: time of a copy` in *Transfers*, and raise min_load_tokens.",
            units.SECONDS,
            (
                Query(
                    quantile(0.5, "kvoffload_first_token_seconds", "found"),
                    "{{found}}",
                    tuple(one.value for one in Found),
                ),
                one(f"histogram_quantile(0.5, {_FIRST_TOKEN})", "vLLM: half", ENGINE),
                one(f"histogram_quantile(0.99, {_FIRST_TOKEN})", "vLLM: 99 in 100", ENGINE),
            ),
        ),
        Panel(
            "Bytes copied",
            "Both ways, all ranks together.",
            "stores without loads, for hours, are cost without benefit: prompts do not repeat, or blocks are evicted "
            "before they do.",
            units.BYTES_PER_SECOND,
            (each("kvoffload_transfer_bytes_total", "direction"),),
        ),
        Panel(
            "Time of the engine spent in hooks",
            "Seconds that the engine's thread spent in offloading's hooks, per second: the price that every step pays.",
            "over 2 % of the time, see `Hooks by kind` in *Transfers*. In the runbook: KVOffloadHooksSlow.",
            units.SHARE,
            (one(rate(series("kvoffload_hook_seconds", "_sum")), "hooks"),),
        ),
        Panel(
            "Host memory",
            "Slots by state; they sum to the capacity.",
            "no capacity long after the start: the ranks still pin memory, or cannot. Much of it quarantined: copies "
            "hung or blocks were corrupt. In the runbook: KVOffloadNoCapacity, KVOffloadSlotsQuarantined.",
            units.BLOCKS,
            (each("kvoffload_slots", "state"),),
            Kind.STACK,
        ),
    ),
)

_HEALTH = Row(
    "Health",
    (
        Panel(
            "Switched off by",
            "1 while offloading is off for good by this cause.",
            "law_broken and handler_raised are our bugs: report them with the journal. transfer_dead: a rank's copies "
            "stopped; look for the device's errors in its log. In the runbook: KVOffloadDegraded.",
            units.COUNT,
            (each("kvoffload_degraded", "cause", SERIES),),
            Kind.STACK,
            width=6,
            maximum=1,
        ),
        Panel(
            "Blocks that failed",
            "Blocks whose copy failed, was found corrupt, or was abandoned. Requests recompute them; none gets wrong KV.",
            "a steady rate points to the device, its link, or host memory: see `Copies by outcome` in *Transfers* and "
            "the runbook's KVOffloadLoadsFailing and KVOffloadCorruptBlocks.",
            units.BLOCKS_PER_SECOND,
            (
                one(rate(_FAILED_LOADS), "loads failed", SERIES),
                one(rate(_FAILED_STORES), "stores failed", SERIES),
            ),
            width=6,
        ),
        Panel(
            "Surprises by the engine",
            "Things the engine did that its contract does not foresee. Each was survived.",
            "a few after an upgrade of the engine are worth a report; a steady rate costs hits. In the runbook: "
            "KVOffloadEngineSurprises.",
            units.EVENTS_PER_SECOND,
            (each("kvoffload_engine_surprises_total", "cause", SERIES),),
            Kind.STACK,
            width=6,
        ),
        Panel(
            "Resets",
            "Resets of the cache, after which nothing computed before is found again.",
            "one that nobody asked for: look who calls the engine's reset, often a weight update or a sleep.",
            units.EVENTS_PER_SECOND,
            (one(rate(series("kvoffload_resets_total")), "resets", SERIES),),
            width=6,
        ),
    ),
)

OVERVIEW = Board(
    "overview",
    "kvoffload: Overview",
    "Is it worth it, and is it healthy?",
    (_GLANCE, _WORTH, _HEALTH),
)
