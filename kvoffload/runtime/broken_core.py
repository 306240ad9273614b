"""What is left to do once the core has raised: it is cut off, and what it still held is given back (R12).

A core that raised may have stopped half-way through anything, so it is neither told nor asked anything more. What must
still happen needs little: which blocks are leased, and which jobs the workers have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvoffload.bus.bus import Bus
from kvoffload.core.offload_core import OffloadCore
from kvoffload.logs import get_logger
from kvoffload.model.causes import DegradeCause
from kvoffload.model.events import Event, OffloadingDegraded
from kvoffload.model.facts import LawBroken
from kvoffload.runtime.open_copies import OpenCopies

T = TypeVar("T")

log = get_logger("scheduler")


class Follower(Protocol):
    """Keeps what began until an event tells of its end."""

    def forget_all(self) -> None:
        """No such event will come any more."""


class BrokenCore:
    """Notes that the core has raised, and takes its place.

    Args:
        core: which.
        bus: tells it of facts.
        copies: what the workers may still touch.
        followers: those that count on the core's events for the ends of what they follow.
    """

    def __init__(
        self, core: OffloadCore, bus: Bus, copies: OpenCopies, followers: Sequence[Follower]
    ) -> None:
        self._core = core
        self._bus = bus
        self._copies = copies
        self._followers = followers
        self.error: str | None = None
        """What the core was doing when it raised, and what it raised; None for a core that works."""
        self.is_due = False
        """Whether the core has raised and is to be cut off, which must wait until the bus is idle."""
        self.is_off = False

    def ask(self, name: str, question: Callable[[], T], otherwise: T) -> T:
        """Ask a core that works, between two facts; one that has raised, now or before, does not answer."""
        if self.error is None:
            try:
                return question()
            except Exception as error:
                self.raised(error, name)
                self.cut_off()
        return otherwise

    def raised(self, error: Exception, doing: str) -> None:
        """Note that the core raised. Only the first time counts: it explains the others."""
        if self.error is None:
            log.error("core_raised", error=repr(error), doing=doing, exc_info=error)
            self.error, self.is_due = f"{doing}: {error!r}", True

    def cut_off(self) -> None:
        """Let the core settle what it still can, then tell it nothing more, and give back what nobody copies."""
        self.is_due, self.is_off = False, True
        cause, detail = DegradeCause.HANDLER_RAISED, self.error or ""
        was_on = self._core.state.degraded is None
        self._bus.publish(LawBroken(cause, detail))
        events: list[Event] = _tried(self._core.take_events, [])
        if was_on and not any(isinstance(event, OffloadingDegraded) for event in events):
            events.append(OffloadingDegraded(cause, detail))
        for event in events:
            self._bus.publish(event)
        self._bus.drop_handlers()
        for follower in self._followers:
            follower.forget_all()
        self.give_back()

    def give_back(self) -> None:
        """Release the blocks that are leased and that no open copy touches."""
        leases = self._core.state.leases
        loose = Counter(leases.counts()) - self._copies.blocks()
        if loose:
            _tried(lambda: leases.give_back([*loose.elements()]), None)

    def problems(self) -> list[str]:
        """Return what an audit says of a core that has raised, nothing of one that works."""
        if self.error is None:
            return []
        leased = Counter(self._core.state.leases.counts())
        problems = [f"the core raised and was cut off: {self.error}"]
        if leased != self._copies.blocks():
            problems.append(
                f"{leased.total()} blocks are leased, copies touch {self._copies.blocks().total()}"
            )
        return problems


def _tried(question: Callable[[], T], otherwise: T) -> T:
    try:
        return question()
    except Exception as error:
        log.error("core_raised_again", error=repr(error), exc_info=error)
        return otherwise
