"""Adds up a journal's lines: totals, and the samples that figures are drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.bus.bus import Bus
from kvoffload.model import events
from kvoffload.model.causes import StoreOutcome
from kvoffload.telemetry.counters import Counters, Snapshot
from kvoffload.telemetry.journal_reader import Record

_SAMPLED = (events.LookupAnswered, events.FirstTokenReached, events.RankReported)
_ENDS_FILLING = (StoreOutcome.STORED, StoreOutcome.FAILED, StoreOutcome.ABANDONED, StoreOutcome.CANCELLED)


@dataclass(slots=True)
class Account:
    """Samples of a journal, and its events as the metrics count them.

    Args:
        lines: how many were read.
        dropped_lines: lines that are missing between others.
        seconds: from the first line to the last.
        samples: lookups, first tokens and copies, each with its seconds since the first line, by the event's class.
        slots: the host's slots by state, counted from the first line on, each time with its seconds.
        counted: the metrics' counters.
    """

    lines: int = 0
    dropped_lines: int = 0
    seconds: float = 0.0
    samples: dict[type, list[tuple[float, Any]]] = field(
        default_factory=lambda: {cls: [] for cls in _SAMPLED}
    )
    slots: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)
    counted: Snapshot = field(default_factory=lambda: Counters().snapshot())


def add_up(records: Iterable[Record]) -> Account:
    """Add up lines."""
    account, bus, counters = Account(), Bus(), Counters()
    counters.subscribe(bus)
    begun, before, slots = 0.0, 0, Counter[str]()
    for record in records:
        if not account.lines:
            begun = record.time
        elif record.sequence > before:
            account.dropped_lines += record.sequence - before - 1
        else:  # another process wrote from here on
            slots.clear()
        before, at, message = record.sequence, record.time - begun, record.message
        account.lines += 1
        account.seconds = max(account.seconds, at)
        bus.publish(message)
        if (samples := account.samples.get(type(message))) is not None:
            samples.append((at, message))
        if _count_slots(slots, message):
            account.slots.append((at, +slots))  # blocks stored before the first line are not known
    account.counted = counters.snapshot()
    return account


def by_label(counted: Snapshot, name: str) -> dict[str, int]:
    """Return the series that are not 0, largest first, of a metric with one label."""
    ordered = sorted(counted.counts.get(name, {}).items(), key=lambda item: -item[1])
    return {labels[0]: number for labels, number in ordered if number}


def _count_slots(slots: Counter[str], event: object) -> bool:
    """Apply an event to the host's slots, and return whether it may have changed them."""
    match event:
        case events.StoreScheduled():
            slots["filling"] += event.blocks
        case events.StoreEnded(outcome=outcome) if outcome in _ENDS_FILLING:
            slots["filling"] -= event.blocks
            slots["ready"] += event.blocks if outcome is StoreOutcome.STORED else 0
        case events.BlocksEvicted():
            slots["ready"] -= event.blocks
        case _:
            return False
    return True
