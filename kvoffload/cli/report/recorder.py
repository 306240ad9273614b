"""A demo's own journal in memory: complete, from the moment it begins, and with the host's slots as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvoffload.cli.report.account import Account, Occupancy, add_up
from kvoffload.model.events import Event
from kvoffload.model.facts import Fact
from kvoffload.telemetry.journal import Entry, Record
from kvoffload.telemetry.records import Summary, compact, from_plain, to_plain

if TYPE_CHECKING:
    from kvoffload.runtime.scheduler_side import SchedulerSide


class Recorder:
    """Keeps what is published from now on. It costs the engine an append a message and a look at the slots a fact.

    Args:
        offload: whose.
        now: the clock that times are told by; seconds.
    """

    def __init__(self, offload: SchedulerSide, now: Callable[[], float]) -> None:
        self._offload, self._now = offload, now
        self._entries: list[Entry] = []
        self._occupancy: list[Occupancy] = []
        self._look()
        offload.bus.count(Fact, self._keep)
        offload.bus.count(Event, self._keep)

    def account(self) -> Account:
        """Add up what was kept."""
        self._look()
        account = add_up(
            Record(entry.sequence, entry.time, _read(entry.message)) for entry in list(self._entries)
        )
        account.occupancy = self._occupancy
        account.capacity = self._offload.gauges().capacity_slots
        return account

    def _keep(self, message: object) -> None:
        self._entries.append(Entry(len(self._entries) + 1, self._now(), compact(message)))
        if isinstance(message, Fact):
            self._look()

    def _look(self) -> None:
        slots = dict(self._offload.gauges().slots)
        if not self._occupancy or slots != self._occupancy[-1].slots:
            self._occupancy.append(Occupancy(self._now(), slots))


def _read(message: object) -> Event | Summary:
    plain = to_plain(message)
    return from_plain(str(plain.pop("event")), plain)
