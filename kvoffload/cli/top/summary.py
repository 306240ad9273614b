"""One engine's numbers as `top` shows them: the same on a terminal, in a pipe and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvoffload.cli.top.reading import Change, History
from kvoffload.core.machine import SlotState
from kvoffload.model.causes import Found, MissCause
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.catalogue import BY_NAME
from kvoffload.telemetry.labels import Answer, HostBytes, LookupResult, TierState, label_of

_HIT, _MISS = (result.value for result in LookupResult)
_HOST, _DISK, _REMOTE = Tier.HOST.value, Tier.DISK.value, Tier.REMOTE.value
_TOKENS = "kvoffload_lookup_tokens_total"
_MISSES, _FIRST_TOKEN = "kvoffload_miss_blocks_total", "kvoffload_first_token_seconds"
_LOSSES = ("kvoffload_load_wait_seconds_total", "kvoffload_interference_seconds_total")
_SAVED = "kvoffload_prefill_seconds_saved_total"
_TROUBLES = {
    "kvoffload_abandoned_jobs_total": "jobs abandoned",
    "kvoffload_engine_surprises_total": "contract violations by the engine",
    "kvoffload_bus_removed_total": "observers removed",
    "kvoffload_bus_dropped_total": "events dropped",
    "kvoffload_journal_write_errors_total": "write errors of the journal",
    "kvoffload_span_export_errors_total": "batches of spans not sent",
}

Number = float | None
"""None: not known, as a rate is after one reading."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A counter: its sum since the engine's start, and its growth per second over the window."""

    total: float
    per_s: Number


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds, of the samples in the window; of all samples where there is only one reading."""

    p50_s: Number
    p99_s: Number


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies in one direction.

    Args:
        bytes: copied.
        copy, queue: times of a job.
        open_jobs: now; None where the engine does not say.
    """

    bytes: Flow
    copy: Percentiles
    queue: Percentiles
    open_jobs: int | None


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier below the host, where the engine has one.

    Args:
        state: what it does.
        slots: by state.
        capacity_slots: that every rank has.
        slot_bytes: of a slot on all ranks.
        evicted_blocks: by any cause.
        fetched_tokens: of hits, what was fetched from it.
        copies: by direction.
        blocks: of these copies, by direction and outcome.
    """

    state: str
    slots: Mapping[str, float]
    capacity_slots: float
    slot_bytes: float
    evicted_blocks: Flow
    fetched_tokens: Flow
    copies: Mapping[str, Copies]
    blocks: Mapping[str, Flow]


@dataclass(frozen=True, slots=True)
class Store:
    """The store that engines share, where the engine has one.

    Args:
        state: what it does.
        asked_blocks: of arriving requests, by the store's answer.
        ask: time of a call that asks.
        fetched_tokens: of hits, what was fetched from it.
        saved_s: seconds that computing these tokens would have taken, at the rate now; None while it is not measured.
        copies: by direction.
        blocks: of these copies, by direction and outcome.
    """

    state: str
    asked_blocks: Mapping[str, Flow]
    ask: Percentiles
    fetched_tokens: Flow
    saved_s: Number
    copies: Mapping[str, Copies]
    blocks: Mapping[str, Flow]


@dataclass(frozen=True, slots=True)
class Summary:
    """One engine.

    Args:
        engine: its name; empty where the server does not name it.
        window_s: seconds that rates and percentiles cover; 0 after one reading.
        restarts: how often it restarted while it was watched.
        info: versions and settings.
        off_because: causes for which offloading is off.
        found_tokens, missed_tokens: prompt tokens looked up on the host.
        hit_ratio, hit_ratio_lately: since the start, and over the window.
        saved_s, waited_s, interference_s, net_s: seconds.
        net_is_negative: as the engine's own estimate says.
        break_even_tokens: 0 while not measured.
        first_token: by what was found.
        host_bytes: wanted, reserved and used.
        slots: by state.
        capacity_slots: of all ranks.
        evicted_blocks: by any cause.
        copies: by direction.
        missed_lookups: lookups that missed, by cause.
        behind_miss_blocks: blocks behind a first missing one.
        stores, loads: blocks by outcome.
        hooks_share: of the engine's time.
        oldest_pin_s: its age; None without one.
        resets: since the start.
        troubles: what went wrong, by its name.
        disk: None where the engine has none.
        store: None where the engine shares none.
    """

    engine: str
    window_s: float
    restarts: int
    info: Mapping[str, str]
    off_because: tuple[str, ...]
    found_tokens: Flow
    missed_tokens: Flow
    hit_ratio: Number
    hit_ratio_lately: Number
    saved_s: Flow
    waited_s: Flow
    interference_s: Flow
    net_s: Flow
    net_is_negative: bool
    break_even_tokens: int
    first_token: Mapping[str, Percentiles]
    host_bytes: Mapping[str, float]
    slots: Mapping[str, float]
    capacity_slots: float
    evicted_blocks: Flow
    copies: Mapping[str, Copies]
    missed_lookups: Mapping[str, Flow]
    behind_miss_blocks: Flow
    stores: Mapping[str, Flow]
    loads: Mapping[str, Flow]
    hooks_share: Number
    oldest_pin_s: Number
    resets: float
    troubles: Mapping[str, float]
    disk: LowerTier | None = None
    store: Store | None = None


def summarize(engine: str, history: History, unix_now: float) -> Summary:
    """Return an engine's numbers."""
    now, window = history.now, history.window
    found, missed = (_flow(window, _TOKENS, result) for result in (_HIT, _MISS))
    saved, waited, interference = (_total(window, name) for name in (_SAVED, *_LOSSES))
    pinned = now.number("kvoffload_oldest_pin_timestamp_seconds")
    return Summary(
        engine=engine,
        window_s=window.seconds,
        restarts=history.restarts,
        info=_info(window),
        off_because=tuple(_by_label(window, "kvoffload_degraded")),
        found_tokens=found,
        missed_tokens=missed,
        hit_ratio=_ratio(found.total, found.total + missed.total),
        hit_ratio_lately=_ratio_lately(found, missed),
        saved_s=saved,
        waited_s=waited,
        interference_s=interference,
        net_s=_less(saved, waited, interference),
        net_is_negative=bool(now.total("kvoffload_net_benefit_negative")),
        break_even_tokens=int(now.total("kvoffload_break_even_tokens")),
        first_token={each.value: _percentiles(window, _FIRST_TOKEN, each.value) for each in Found},
        host_bytes={part.value: now.number("kvoffload_host_bytes", part.value) for part in HostBytes},
        slots=_slots(window, _HOST),
        capacity_slots=now.number("kvoffload_capacity_slots", _HOST),
        evicted_blocks=_evicted(window, _HOST),
        copies={way.value: _copies(window, _HOST, way.value) for way in Direction},
        missed_lookups=_missed_lookups(window),
        behind_miss_blocks=_flow(window, _MISSES, MissCause.BEHIND_MISS.value),
        stores=_by_label(window, "kvoffload_store_blocks_total"),
        loads=_by_label(window, "kvoffload_load_blocks_total"),
        hooks_share=window.total_rate("kvoffload_hook_seconds_sum"),
        oldest_pin_s=max(unix_now - pinned, 0.0) if pinned else None,
        resets=now.total("kvoffload_resets_total"),
        troubles={words: number for name, words in _TROUBLES.items() if (number := now.total(name))},
        disk=_disk(window),
        store=_store(window),
    )


def _disk(window: Change) -> LowerTier | None:
    now, state = window.now, _state(window, _DISK)
    if state is TierState.OFF:
        return None
    return LowerTier(
        state.value,
        _slots(window, _DISK),
        now.number("kvoffload_capacity_slots", _DISK),
        now.number("kvoffload_slot_bytes", _DISK),
        _evicted(window, _DISK),
        _flow(window, "kvoffload_fetched_tokens_total", _DISK),
        {way.value: _copies(window, _DISK, way.value) for way in Direction},
        _blocks(window, _DISK),
    )


def _store(window: Change) -> Store | None:
    state = _state(window, _REMOTE)
    if state is TierState.OFF:
        return None
    fetched = _flow(window, "kvoffload_fetched_tokens_total", _REMOTE)
    return Store(
        state.value,
        {each.value: _flow(window, "kvoffload_remote_asked_blocks_total", each.value) for each in Answer},
        _percentiles(window, "kvoffload_remote_ask_seconds"),
        fetched,
        _ratio(fetched.total, window.now.total("kvoffload_prefill_tokens_per_second")),
        {way.value: _copies(window, _REMOTE, way.value) for way in Direction},
        _blocks(window, _REMOTE),
    )


def _state(window: Change, tier: str) -> TierState:
    states = (state for state in TierState if window.now.number("kvoffload_tier_state", tier, state.value))
    return next(states, TierState.OFF)


def _blocks(window: Change, tier: str) -> dict[str, Flow]:
    """Return the blocks of copies with a tier that are not 0, by direction and outcome."""
    name = "kvoffload_tier_blocks_total"
    series = window.now.numbers.get(name, {})
    ours = [labels for labels in series if labels[0] == tier and series[labels]]
    return {" ".join(labels[1:]): _flow(window, name, *labels) for labels in ours}


def _slots(window: Change, tier: str) -> dict[str, float]:
    return {
        label_of(state): window.now.number("kvoffload_slots", tier, label_of(state)) for state in SlotState
    }


def _evicted(window: Change, tier: str) -> Flow:
    name = "kvoffload_evicted_blocks_total"
    flows = [_flow(window, name, *labels) for labels in window.now.numbers.get(name, {}) if labels[0] == tier]
    rates = [flow.per_s for flow in flows if flow.per_s is not None]
    return Flow(
        sum(flow.total for flow in flows), sum(rates) if window.before is not None and rates else None
    )


def _flow(window: Change, name: str, *labels: str) -> Flow:
    return Flow(window.now.number(name, *labels), window.rate(name, *labels))


def _total(window: Change, name: str) -> Flow:
    return Flow(window.now.total(name), window.total_rate(name))


def _less(one: Flow, *others: Flow) -> Flow:
    rate = one.per_s
    for other in others:
        rate = rate - other.per_s if rate is not None and other.per_s is not None else None
    return Flow(one.total - sum(other.total for other in others), rate)


def _by_label(window: Change, name: str) -> dict[str, Flow]:
    """Return the series that are not 0, largest first."""
    series = window.now.numbers.get(name, {})
    ordered = sorted(series, key=lambda labels: -series[labels])
    return {labels[0]: _flow(window, name, *labels) for labels in ordered if series[labels]}


def _missed_lookups(window: Change) -> dict[str, Flow]:
    causes = _by_label(window, _MISSES)
    causes.pop(MissCause.BEHIND_MISS.value, None)
    return causes


def _copies(window: Change, tier: str, way: str) -> Copies:
    jobs = window.now.numbers.get("kvoffload_open_jobs", {})
    ours = [number for labels, number in jobs.items() if labels[:2] == (tier, way)]
    return Copies(
        _flow(window, "kvoffload_transfer_bytes_total", tier, way),
        _percentiles(window, "kvoffload_transfer_seconds", tier, way),
        _percentiles(window, "kvoffload_transfer_queue_seconds", tier, way),
        int(sum(ours)) if ours else None,
    )


def _percentiles(window: Change, name: str, *labels: str) -> Percentiles:
    return Percentiles(window.quantile(0.5, name, *labels), window.quantile(0.99, name, *labels))


def _info(window: Change) -> dict[str, str]:
    for labels in window.now.numbers.get("kvoffload_info", {}):
        return dict(zip(BY_NAME["kvoffload_info"].label_names, labels, strict=True))
    return {}


def _ratio_lately(found: Flow, missed: Flow) -> Number:
    if found.per_s is None or missed.per_s is None:
        return None
    return _ratio(found.per_s, found.per_s + missed.per_s)


def _ratio(part: float, whole: float) -> Number:
    return part / whole if whole > 0 else None
