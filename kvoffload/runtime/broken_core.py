"""What is left to do once the core has raised: it is cut off, and what it still holds is released (R12).

A core that raised may have stopped half-way through anything, so it gets no fact and no question any more. What must still
happen needs little: which blocks are leased, and which jobs the workers have.
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
from kvoffload.model.facts import InvariantBroken
from kvoffload.runtime.degradation import Degradation
from kvoffload.runtime.open_copies import OpenCopies

T = TypeVar("T")

log = get_logger("scheduler")


class Follower(Protocol):
    """Keeps what began until an event reports its end."""

    def forget_all(self) -> None:
        """No such event will come any more."""


class BrokenCore:
    """Notes that the core has raised, and takes its place.

    Args:
        core: which.
        bus: brings it facts.
        copies: what the workers may still touch.
        degradation: follows the event that switches offloading off.
        followers: those that count on the core's events for the ends of what they follow.
    """

    def __init__(
        self,
        core: OffloadCore,
        bus: Bus,
        copies: OpenCopies,
        degradation: Degradation,
        followers: Sequence[Follower],
    ) -> None:
        self._core = core
        self._bus = bus
        self._copies = copies
        self._degradation = degradation
        self._followers = followers
        self.error: str | None = None
        """What the core was doing when it raised, and what it raised; None for a core that works."""
        self.pending_error: tuple[Exception, str] | None = None
        """What another thread saw the core raise. The engine's thread cuts the core off in its next step."""
        self.is_off = False
        """Whether the core has been cut off."""

    def ask(self, name: str, question: Callable[[], T], otherwise: T) -> T:
        """Ask a core that works; one that has raised, now or before, does not answer."""
        if self.error is None:
            try:
                return question()
            except Exception as error:
                self.raised(error, name)
        return otherwise

    def handler_raised(self, error: Exception, fact: object) -> None:
        """Note that a state handler raised."""
        self.raised(error, type(fact).__name__)

    def raised(self, error: Exception, doing: str) -> None:
        """Cut the core off, when the batch that is being dispatched is over. The first exception explains the others."""
        if self.error is None:
            log.error("core_raised", error=repr(error), doing=doing, exc_info=error)
            self.error = f"{doing}: {error!r}"
            self._bus.afterwards(self._cut_off)

    def raised_on_another_thread(self, error: Exception, doing: str) -> None:
        """Keep what the core raised for the engine's thread: only that thread may cut the core off."""
        self.pending_error = error, doing

    def release_loose(self) -> None:
        """Release the blocks that are leased and that no open copy touches."""
        leases = self._core.state.leases
        loose = Counter(leases.counts) - self._copies.blocks()
        if loose:
            _try(lambda: leases.release([*loose.elements()]))

    def problems(self) -> list[str]:
        """Return what an audit says of a core that has raised, nothing of one that works."""
        if self.error is None:
            return []
        leased, touched = Counter(self._core.state.leases.counts), self._copies.blocks()
        problems = [f"the core raised and was cut off: {self.error}"]
        if leased != touched:
            problems.append(f"{leased.total()} blocks are leased, copies touch {touched.total()}")
        return problems

    def _cut_off(self) -> None:
        """Let the core end what it still can, then give it nothing more, and release what no worker copies."""
        cause, detail = DegradeCause.HANDLER_RAISED, self.error or ""
        self._bus.publish(InvariantBroken(cause, detail))
        self._bus.drop_handlers()
        for event in self._left_events():
            self._bus.publish(event)
        if self._degradation.cause is None:
            self._bus.publish(OffloadingDegraded(cause, detail))
        self.is_off = True
        for follower in self._followers:
            follower.forget_all()
        self.release_loose()

    def _left_events(self) -> list[Event]:
        return _try(lambda: self._core.state.tally.take(everything=True)) or []


def _try(act: Callable[[], T]) -> T | None:
    try:
        return act()
    except Exception as error:
        log.error("core_raised_again", error=repr(error), exc_info=error)
        return None
