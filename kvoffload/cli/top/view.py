"""What `top` shows, as lines of text: pure, so that it is the same on a terminal, in a pipe and in a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoffload.cli.top.reading import Change
from kvoffload.cli.top.words import bar, count, duration, per_second, seconds, share, size
from kvoffload.core.machine import SlotState
from kvoffload.model.causes import Found
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.break_even import NEVER_TOKENS
from kvoffload.telemetry.catalogue import BY_NAME
from kvoffload.telemetry.labels import LookupResult, label_of

_HIT, _MISS = (result.value for result in LookupResult)
_HOST = Tier.HOST.value
_ROWS = 8  # of a list of causes or outcomes
_BAR = 30
_FAILED = ("failed", "corrupt", "abandoned")


@dataclass(frozen=True, slots=True)
class Line:
    """One line; `alarm` where something is wrong, `heading` above others."""

    text: str
    heading: bool = False
    alarm: bool = False


def show(change: Change, unix_now: float) -> list[Line]:
    """Return the page of numbers."""
    sections = (_tokens, _benefit, _host, _transfers, _misses, _stores, _loads)
    lines = [Line(""), *_health(change, unix_now)]
    for section in sections:
        lines += [Line(""), *section(change)]
    return lines


def _tokens(change: Change) -> Iterator[Line]:
    name = "kvoffload_lookup_tokens_total"
    hits, misses = change.now.number(name, _HIT), change.now.number(name, _MISS)
    new_hits, new_misses = change.added(name, _HIT), change.added(name, _MISS)
    yield _row("prompt tokens looked up", "since start", "per second", heading=True)
    yield _row("  found on the host", count(hits), per_second(change.rate(name, _HIT)))
    yield _row("  missed", count(misses), per_second(change.rate(name, _MISS)))
    lately = share(new_hits, new_hits + new_misses) if change.before is not None else "-"
    yield _row("  hit ratio", share(hits, hits + misses), lately)


def _benefit(change: Change) -> Iterator[Line]:
    """Seconds, all requests together; a second per second is a whole engine's time."""
    saved, lost = "kvoffload_prefill_seconds_saved_total", ("load_wait", "interference")
    losses = [f"kvoffload_{name}_seconds_total" for name in lost]
    is_negative = bool(change.now.total("kvoffload_net_benefit_negative"))
    yield _row("net benefit, in seconds", "since start", "per second", heading=True)
    net, rate = change.now.total(saved), change.total_rate(saved)
    yield _row("  prefilling saved", seconds(net), seconds(rate))
    for name, words in zip(losses, ("waited for loads", "interference of copies"), strict=True):
        lost_s, lost_rate = change.now.total(name), change.total_rate(name)
        yield _row(f"  {words}", seconds(lost_s), seconds(lost_rate))
        net -= lost_s
        rate = rate - lost_rate if rate is not None and lost_rate is not None else None
    yield _row("  net", seconds(net), seconds(rate), alarm=is_negative)
    yield Line(f"  {_break_even(change)}")
    yield Line(f"  first token, mean by what was found: {_first_tokens(change)}")


def _first_tokens(change: Change) -> str:
    """Since the reading before; since the start where there is only one."""
    name = "kvoffload_first_token_seconds"
    return ", ".join(f"{found.value} {duration(change.mean(name, found.value))}" for found in Found)


def _break_even(change: Change) -> str:
    tokens = change.now.total("kvoffload_break_even_tokens")
    if not tokens:
        return "break-even not measured yet"
    return "no hit pays" if tokens >= NEVER_TOKENS else f"hits pay from {count(tokens)} tokens on"


def _host(change: Change) -> Iterator[Line]:
    capacity = change.now.total("kvoffload_capacity_slots")
    yield Line(f"host memory, {count(capacity)} blocks", heading=True)
    for state in SlotState:
        slots = change.now.number("kvoffload_slots", _HOST, label_of(state))
        if slots or state in (SlotState.READY, SlotState.EMPTY):
            alarm = state is SlotState.QUARANTINED
            yield Line(
                f"  {label_of(state):<22}{count(slots):>14}  {bar(slots, capacity, _BAR)}", alarm=alarm
            )
    name = "kvoffload_evicted_blocks_total"
    evicted = [change.rate(name, *labels) for labels in change.now.numbers.get(name, {})]
    rates = [rate for rate in evicted if rate is not None]
    yield _row("  evicted", count(change.now.total(name)), per_second(sum(rates) if rates else None))


def _transfers(change: Change) -> Iterator[Line]:
    yield Line(
        f"{'copies':<12}{'bytes':>12}{'per second':>14}{'mean time':>12}{'mean queue':>12}{'open':>8}",
        heading=True,
    )
    for direction in Direction:
        way = direction.value
        moved = change.now.number("kvoffload_transfer_bytes_total", _HOST, way)
        rate = change.rate("kvoffload_transfer_bytes_total", _HOST, way)
        took = change.mean("kvoffload_transfer_seconds", _HOST, way)
        queued = change.mean("kvoffload_transfer_queue_seconds", _HOST, way)
        jobs = change.now.numbers.get("kvoffload_open_jobs", {})
        opened = sum(number for labels, number in jobs.items() if labels[0] == way)
        yield Line(
            f"  {way:<10}{size(moved):>12}{size(rate):>14}{duration(took):>12}{duration(queued):>12}{count(opened):>8}"
        )


def _misses(change: Change) -> Iterator[Line]:
    return _by_label(change, "kvoffload_miss_blocks_total", "missed blocks, by cause")


def _stores(change: Change) -> Iterator[Line]:
    return _by_label(change, "kvoffload_store_blocks_total", "offered blocks, by outcome", _FAILED)


def _loads(change: Change) -> Iterator[Line]:
    return _by_label(change, "kvoffload_load_blocks_total", "loaded blocks, by outcome", _FAILED)


def _by_label(change: Change, name: str, title: str, alarms: Sequence[str] = ()) -> Iterator[Line]:
    """The largest ones, and the rest in one line, so that the sums can be checked by eye."""
    series = change.now.numbers.get(name, {})
    ranked = sorted(series, key=lambda labels: -series[labels])
    shown = [labels for labels in ranked if series[labels]][:_ROWS]
    yield _row(title, count(change.now.total(name)), "per second", heading=True)
    for labels in shown:
        rate = per_second(change.rate(name, *labels))
        yield _row(f"  {labels[0]}", count(series[labels]), rate, alarm=labels[0] in alarms)
    if rest := sum(series[labels] for labels in ranked if labels not in shown):
        yield _row("  others", count(rest), "")


def _health(change: Change, unix_now: float) -> Iterator[Line]:
    off = [labels[0] for labels, flag in change.now.numbers.get("kvoffload_degraded", {}).items() if flag]
    yield Line(f"offloading is {f'OFF: {off[0]}' if off else 'on'}", heading=not off, alarm=bool(off))
    pinned = change.now.number("kvoffload_oldest_pin_timestamp_seconds")
    hooks = [
        change.rate("kvoffload_hook_seconds_sum", *labels)
        for labels in BY_NAME["kvoffload_hook_seconds"].series
    ]
    known = [rate for rate in hooks if rate is not None]
    yield Line(
        f"  hooks take {share(sum(known), 1) if known else '-'} of the engine's time; oldest pin "
        f"{duration(max(unix_now - pinned, 0)) if pinned else 'none'}; "
        f"{count(change.now.total('kvoffload_resets_total'))} resets"
    )
    yield from _troubles(change)


def _troubles(change: Change) -> Iterator[Line]:
    names = {
        "kvoffload_abandoned_jobs_total": "jobs abandoned",
        "kvoffload_engine_surprises_total": "surprises by the engine",
        "kvoffload_bus_removed_total": "observers removed",
        "kvoffload_bus_dropped_total": "events dropped",
        "kvoffload_journal_write_errors_total": "errors of the journal's file",
        "kvoffload_span_export_errors_total": "batches of spans not sent",
    }
    found = [(change.now.total(name), words) for name, words in names.items()]
    if troubles := [f"{count(number)} {words}" for number, words in found if number]:
        yield Line(f"  {', '.join(troubles)}", alarm=True)


def _row(name: str, total: str, rate: str, *, heading: bool = False, alarm: bool = False) -> Line:
    return Line(f"{name:<30}{total:>18}{rate:>16}".rstrip(), heading, alarm)
