"""What a journal's lines add up to, and when: totals, and samples that plots are drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvoffload.model import events
from kvoffload.model.causes import CopyOutcome, MissCause, StoreOutcome
from kvoffload.model.ids import JobId, SlotId
from kvoffload.model.transfer import Direction
from kvoffload.telemetry.journal import Record
from kvoffload.telemetry.labels import SlotLabel
from kvoffload.telemetry.records import Summary

_FILLING, _READY, _PINNED = (one.value for one in (SlotLabel.FILLING, SlotLabel.READY, SlotLabel.PINNED))
_ENDS_FILLING = frozenset(
    (StoreOutcome.STORED, StoreOutcome.FAILED, StoreOutcome.ABANDONED, StoreOutcome.CANCELLED)
)


class Lookup(NamedTuple):
    """Tokens of a prompt that a settled lookup accounts for, by where they came from."""

    time: float
    device_tokens: int
    host_tokens: int
    missed_tokens: int


class Copy(NamedTuple):
    """A copy that one rank reported. It ended before `time`, by as much as the report took to be heard."""

    time: float
    direction: Direction
    copied_bytes: int
    queue_s: float
    copy_s: float


class Occupancy(NamedTuple):
    """The host's slots by state at one moment; what the mapping does not hold is 0 or not known."""

    time: float
    slots: dict[str, int]


@dataclass(slots=True)
class Account:
    """Sums and samples of a journal. Totals are those of the metrics with the same meaning.

    Args:
        lines: how many were told.
        dropped_lines: numbers that the sequence leaves out, by jumps.
        processes: how many wrote the lines, one after the other.
        begun, ended: times of the first and the last line; of no line, 0.
        events: how often each was told, by name.
        lookups: every settled lookup.
        misses: blocks that missed, by cause.
        offered_blocks: to the host.
        stores: blocks by what became of them.
        loads: blocks of loads by what became of them.
        evictions: blocks by cause.
        copies: every copy that was reported.
        occupancy: the host's slots over time.
        capacity: slots of the host, None where nobody told.
    """

    lines: int = 0
    dropped_lines: int = 0
    processes: int = 0
    begun: float = 0.0
    ended: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    lookups: list[Lookup] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    offered_blocks: int = 0
    stores: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    copies: list[Copy] = field(default_factory=list)
    occupancy: list[Occupancy] = field(default_factory=list)
    capacity: int | None = None

    @property
    def seconds(self) -> float:
        """From the first line to the last."""
        return self.ended - self.begun

    def copied_bytes(self, direction: Direction) -> int:
        """Return what was copied this way."""
        return sum(copy.copied_bytes for copy in self.copies if copy.direction is direction)


def add_up(records: Iterable[Record]) -> Account:
    """Return what these lines add up to; nothing of them is kept but numbers."""
    reader = _Reader()
    for record in records:
        reader.tell(record)
    reader.sample()
    return reader.account


class _Slots:
    """The host's slots, as far as events tell: a pin is known by its load, not from the lookup on."""

    def __init__(self) -> None:
        self._filling = self._ready = 0
        self._loads: dict[JobId, tuple[SlotId, ...]] = {}

    def now(self) -> dict[str, int]:
        pinned = len({slot for slots in self._loads.values() for slot in slots})
        return {_PINNED: pinned, _READY: max(self._ready - pinned, 0), _FILLING: max(self._filling, 0)}

    def tell(self, event: object) -> bool:
        """Return whether the event changed anything."""
        match event:
            case events.StoreScheduled():
                self._filling += event.blocks
            case events.StoreSettled(outcome=outcome) if outcome in _ENDS_FILLING:
                self._filling -= event.blocks
                self._ready += event.blocks if outcome is StoreOutcome.STORED else 0
            case events.LoadScheduled():
                self._loads[event.job] = event.slots
            case events.LoadEnded():
                self._loads.pop(event.job, None)
            case events.BlocksEvicted():
                self._ready -= event.blocks
            case _:
                return False
        return True


class _Reader:
    def __init__(self) -> None:
        self.account = Account()
        self._sequence = 0
        self._slots = _Slots()
        self._changed: float | None = None
        self._on_event: dict[type, Callable[[float, Any], None]] = {
            events.LookupSettled: self._on_lookup,
            events.BlocksOffered: self._on_offered,
            events.StoreSettled: self._on_store,
            events.LoadEnded: self._on_load,
            events.BlocksEvicted: self._on_evicted,
            events.RankReported: self._on_copy,
            events.CapacityGrown: self._on_capacity,
        }

    def tell(self, record: Record) -> None:
        account, message = self.account, record.message
        if isinstance(message, Summary):
            self.sample()  # an engine's fact: all events of the one before it are told, in whatever order
        self._count_line(record)
        account.events[message.name if isinstance(message, Summary) else type(message).__name__] += 1
        if (react := self._on_event.get(type(message))) is not None:
            react(record.time, message)
        if self._slots.tell(message):
            self._changed = record.time

    def sample(self) -> None:
        """Note the host's slots, if they have changed."""
        if self._changed is not None:
            self.account.occupancy.append(Occupancy(self._changed, self._slots.now()))
        self._changed = None

    def _count_line(self, record: Record) -> None:
        account = self.account
        if record.sequence <= self._sequence or not account.lines:
            self.sample()
            account.processes += 1
            self._slots = _Slots()
        else:
            account.dropped_lines += record.sequence - self._sequence - 1
        if not account.lines:
            account.begun = record.time
        account.lines += 1
        account.ended = max(account.ended, record.time)
        self._sequence = record.sequence

    def _on_lookup(self, at: float, event: events.LookupSettled) -> None:
        account = self.account
        account.lookups.append(Lookup(at, event.device_tokens, event.hit_tokens, event.miss_tokens))
        if event.miss_blocks and event.cause is not None:
            account.misses[event.cause.value] += 1
            if event.miss_blocks > 1:
                account.misses[MissCause.BEHIND_MISS.value] += event.miss_blocks - 1

    def _on_offered(self, _: float, event: events.BlocksOffered) -> None:
        self.account.offered_blocks += event.blocks

    def _on_store(self, _: float, event: events.StoreSettled) -> None:
        self.account.stores[event.outcome.value] += event.blocks

    def _on_load(self, _: float, event: events.LoadEnded) -> None:
        self.account.loads[event.outcome.value] += event.blocks

    def _on_evicted(self, _: float, event: events.BlocksEvicted) -> None:
        self.account.evictions[event.cause.value] += event.blocks

    def _on_copy(self, at: float, event: events.RankReported) -> None:
        took = (event.queue_s, event.copy_s) if event.outcome is CopyOutcome.DONE else (0.0, 0.0)
        self.account.copies.append(Copy(at, event.direction, event.copied_bytes, *took))

    def _on_capacity(self, _: float, event: events.CapacityGrown) -> None:
        self.account.capacity = event.slots
