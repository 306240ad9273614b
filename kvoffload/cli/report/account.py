"""Adds up a journal's lines: totals, and the samples that plots are drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload.bus.bus import Bus
from kvoffload.model import events, facts
from kvoffload.model.causes import CopyOutcome, Found, StoreOutcome
from kvoffload.model.events import Event
from kvoffload.model.facts import Fact
from kvoffload.model.ids import JobId, SlotId
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.journal_reader import Record
from kvoffload.telemetry.labels import Answer
from kvoffload.telemetry.records import Summary
from kvoffload.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from kvoffload.runtime.scheduler_side import SchedulerSide

_ENDS_FILLING = frozenset(
    (StoreOutcome.STORED, StoreOutcome.FAILED, StoreOutcome.ABANDONED, StoreOutcome.CANCELLED)
)


class Lookup(NamedTuple):
    """Tokens of one prompt, by where its lookup found them."""

    time: float
    device_tokens: int
    host_tokens: int
    missed_tokens: int


class FirstToken(NamedTuple):
    """The time that one request waited for its first token."""

    time: float
    found: Found
    seconds: float


class Copy(NamedTuple):
    """A copy that one rank reported. It ended somewhat before `time`, when the report arrived."""

    time: float
    direction: Direction
    copied_bytes: int
    queue_s: float
    copy_s: float
    tier: Tier = Tier.HOST


class Occupancy(NamedTuple):
    """The host's slots by state at one moment; a missing state is 0 or not known."""

    time: float
    slots: dict[str, int]


@dataclass(slots=True)
class Account:
    """Samples of a journal, and its events as the metrics count them.

    Args:
        lines: how many were read.
        first_sequence: number of the first line; 0 without any.
        dropped_lines: lines that are missing between others.
        processes: how many wrote the lines, one after the other.
        begun, ended: times of the first and the last line; 0 without any.
        events: how often each occurred, by name.
        lookups: every answered lookup.
        first_tokens: every first token.
        copies: every reported copy.
        asked: blocks of which the shared store was asked, by its answer.
        occupancy: the host's slots over time.
        capacity: slots of the host, None where it is not known.
        counted: the metrics' counters.
    """

    lines: int = 0
    first_sequence: int = 0
    dropped_lines: int = 0
    processes: int = 0
    begun: float = 0.0
    ended: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    lookups: list[Lookup] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    asked: Counter[Answer] = field(default_factory=Counter)
    occupancy: list[Occupancy] = field(default_factory=list)
    capacity: int | None = None
    counted: Snapshot = field(default_factory=lambda: Counters().snapshot())

    @property
    def seconds(self) -> float:
        """From the first line to the last."""
        return self.ended - self.begun

    def copies_of(self, tier: Tier, direction: Direction) -> list[Copy]:
        """Return the copies to a tier, or from it."""
        return [copy for copy in self.copies if copy.tier is tier and copy.direction is direction]

    def uses(self, tier: Tier) -> bool:
        """Whether anything was copied to it or from it."""
        return any(copy.tier is tier for copy in self.copies)

    def copied_bytes(self, direction: Direction, tier: Tier = Tier.HOST) -> int:
        """Return the bytes that were copied to a tier, or from it."""
        return sum(copy.copied_bytes for copy in self.copies_of(tier, direction))


def add_up(records: Iterable[Record]) -> Account:
    """Add up lines; only numbers are kept."""
    reader = _Reader()
    for record in records:
        reader.read(record)
    return reader.end()


def by_label(counted: Snapshot, name: str, *leading: str) -> dict[str, int]:
    """Return the series of a metric that are not 0, largest first, by their last label; `leading` names those before it."""
    series: Mapping[tuple[str, ...], int] = counted.counts.get(name, {})
    ordered = sorted(series.items(), key=lambda item: -item[1])
    return {labels[-1]: number for labels, number in ordered if number and labels[:-1] == leading}


class Recorder:
    """A demo's own journal in memory: complete from its creation on, and with the host's slots at each fact.

    Args:
        offload: the scheduler's side to record.
        now: seconds.
    """

    def __init__(self, offload: SchedulerSide, now: Callable[[], float]) -> None:
        self._offload, self._now = offload, now
        self._records: list[Record] = []
        self._occupancy: list[Occupancy] = []
        self._look()
        offload.bus.count(Fact, self._keep_fact)
        offload.bus.count(Event, self._keep)

    def account(self) -> Account:
        """Add up what was recorded."""
        self._look()
        account = add_up(self._records)
        account.occupancy = self._occupancy
        account.capacity = self._offload.gauges().capacity_slots
        return account

    def _keep(self, message: Event | Summary) -> None:
        self._records.append(Record(len(self._records) + 1, self._now(), message))

    def _keep_fact(self, fact: Fact) -> None:
        self._keep(Summary(type(fact).__name__, {}))
        self._look()

    def _look(self) -> None:
        slots = dict(self._offload.gauges().slots)
        if not self._occupancy or slots != self._occupancy[-1].slots:
            self._occupancy.append(Occupancy(self._now(), slots))


class _Slots:
    """The host's slots, derived from events: a pin is known by its load, not from the lookup on."""

    def __init__(self) -> None:
        self._filling = self._ready = 0
        self._loads: dict[JobId, tuple[SlotId, ...]] = {}

    def now(self) -> dict[str, int]:
        pinned = len({slot for slots in self._loads.values() for slot in slots})
        return {"pinned": pinned, "ready": max(self._ready - pinned, 0), "filling": max(self._filling, 0)}

    def apply(self, event: object) -> bool:
        """Return whether the event changed anything."""
        match event:
            case events.StoreScheduled():
                self._filling += event.blocks
            case events.StoreEnded(outcome=outcome) if outcome in _ENDS_FILLING:
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
        self._bus, self._counters = Bus(), Counters()
        self._counters.subscribe(self._bus)
        self._on_event: dict[type, Callable[[float, Any], None]] = {
            events.LookupAnswered: self._on_lookup,
            events.FirstTokenReached: self._on_first_token,
            events.RankReported: self._on_copy,
            events.CapacityGrown: self._on_capacity,
        }

    def end(self) -> Account:
        """Return the sums of all lines."""
        self.sample()
        self.account.counted = self._counters.snapshot()
        return self.account

    def read(self, record: Record) -> None:
        account, message = self.account, record.message
        if isinstance(message, Summary):
            self.sample()  # an engine's fact: it ends the events of the fact before
            if message.name == facts.RemoteAnswered.__name__:
                self._on_answer(message.fields)
        self._count_line(record)
        account.events[message.name if isinstance(message, Summary) else type(message).__name__] += 1
        self._bus.publish(message)
        if (react := self._on_event.get(type(message))) is not None:
            react(record.time, message)
        if self._slots.apply(message):
            self._changed = record.time

    def sample(self) -> None:
        """Record the host's slots, if they have changed."""
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
            account.begun, account.first_sequence = record.time, record.sequence
        account.lines += 1
        account.ended = max(account.ended, record.time)
        self._sequence = record.sequence

    def _on_lookup(self, at: float, event: events.LookupAnswered) -> None:
        self.account.lookups.append(Lookup(at, event.device_tokens, event.hit_tokens, event.miss_tokens))

    def _on_answer(self, fields: Mapping[str, Any]) -> None:
        asked = {Answer.FOUND: "found", Answer.MISSING: "missing", Answer.NONE: "unanswered"}
        self.account.asked.update({answer: fields.get(field, 0) for answer, field in asked.items()})

    def _on_first_token(self, at: float, event: events.FirstTokenReached) -> None:
        self.account.first_tokens.append(FirstToken(at, event.found, event.seconds))

    def _on_copy(self, at: float, event: events.RankReported) -> None:
        took = (event.queue_s, event.copy_s) if event.outcome is CopyOutcome.DONE else (0.0, 0.0)
        self.account.copies.append(Copy(at, event.direction, event.copied_bytes, *took, event.tier))

    def _on_capacity(self, _: float, event: events.CapacityGrown) -> None:
        self.account.capacity = event.slots
