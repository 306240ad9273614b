"""The only door into the core: calls it under a guard, audits it, and switches it off when it raises (R12).

A core that raised may have stopped halfway through an update, so it is not called again. After that, offloading only
tracks the leased blocks and the jobs that workers still copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kvoffload.bus.bus import Bus
from kvoffload.core.offload_core import OffloadCore
from kvoffload.logs import get_logger
from kvoffload.model.causes import DegradeCause
from kvoffload.model.engine import AuditsLeases, BlockPool
from kvoffload.model.events import OffloadingDegraded
from kvoffload.model.facts import Fact, InvariantBroken
from kvoffload.model.wire import TransferReport
from kvoffload.runtime.copies import OpenCopies

Result = TypeVar("Result")

log = get_logger("scheduler")


class Faults:
    """Calls the core, handles its exceptions, and audits it.

    Args:
        core: the core.
        bus: passes messages to observers.
        copies: the open copies, with the blocks that workers may still copy.
        device: the engine's block pool.
    """

    def __init__(self, core: OffloadCore, bus: Bus, copies: OpenCopies, device: BlockPool) -> None:
        self._core = core
        self._tally = core.state.tally
        self._bus = bus
        self._copies = copies
        self._device = device if isinstance(device, AuditsLeases) else None
        self.cause: DegradeCause | None = None
        """Why offloading is off; None while it is on."""
        self.error: str | None = None
        """What the core was doing when it raised, and the exception; None if it has not raised."""
        self.in_doubt: Callable[[], object] = lambda: None
        """Called once the core's state cannot be trusted any more."""
        self.audits = 0
        """How many audits were made."""

    # -- calls of the core --------------------------------------------------------------------------------------

    def apply(
        self, react: Callable[..., object], fact: Fact | TransferReport, batch: list[object], *now: float
    ) -> None:
        """Pass a fact or a rank's report to the core's method `react`, and add the core's events to the batch for observers.

        A core that has raised gets no facts. Some methods also take the time in seconds, `now`.
        """
        if self.error is not None:
            return
        tally = self._tally
        try:
            react(fact, *now)
            if tally.events or tally.has_sums:
                batch += tally.take()
        except Exception as error:
            batch += self.raised(error, type(fact).__name__)

    def ask(self, name: str, question: Callable[[], Result], otherwise: Result) -> Result:
        """Call `question` and return its result, or `otherwise` if the core raises now or has raised before."""
        if self.error is None:
            try:
                return question()
            except Exception as error:
                self._bus.dispatch(self.raised(error, name))
        return otherwise

    def raised(self, error: Exception, doing: str) -> list[object]:
        """Stop using the core, and return the messages for observers.

        Later exceptions are ignored, because they follow from the first.
        """
        if self.error is not None:
            return []
        log.error("core_raised", error=repr(error), doing=doing, exc_info=error)
        self.in_doubt()
        self.error = f"{doing}: {error!r}"
        fact = InvariantBroken(DegradeCause.HANDLER_RAISED, self.error)
        _try(lambda: self._core.invariant_broken(fact))
        events = _try(lambda: self._tally.take(everything=True)) or []
        if self.cause is None:
            self.cause = fact.cause
            if not any(isinstance(event, OffloadingDegraded) for event in events):
                events.append(OffloadingDegraded(fact.cause, fact.detail))
        self._copies.stop_draining()
        self.release_loose()
        return [fact, *events]

    def broken(self, cause: DegradeCause, detail: str) -> None:
        """Switch offloading off, because something that must hold does not hold."""
        fact = InvariantBroken(cause, detail)
        batch: list[object] = [fact]
        self.apply(self._core.invariant_broken, fact, batch)
        if self.cause is None:
            self.cause = cause
        self._bus.dispatch(batch)

    def release_loose(self) -> None:
        """Release leased blocks that no worker copies any more."""
        leases = self._core.state.leases
        loose = Counter(leases.counts) - self._copies.blocks()
        if loose:
            _try(lambda: leases.release([*loose.elements()]))

    # -- audits -------------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Return a line for each problem found. Call this method between hooks.

        The cost does not grow with the pool.
        """
        problems: list[str] = self.ask("audit", lambda: [*self._core.audit(), *self._engine_problems()], [])
        if self.error is not None:
            return self._problems_of_a_broken_core()
        self.audits += 1
        if problems:
            self.in_doubt()
            self.broken(DegradeCause.INVARIANT_BROKEN, "; ".join(problems))
        return problems

    def _engine_problems(self) -> list[str]:
        return self._device.lease_problems(self._core.state.leases.counts) if self._device else []

    def _problems_of_a_broken_core(self) -> list[str]:
        leased, touched = Counter(self._core.state.leases.counts), self._copies.blocks()
        problems = [f"the core raised, and is no longer used: {self.error}"]
        if leased != touched:
            problems.append(f"{leased.total()} blocks are leased, copies touch {touched.total()}")
        return problems


def _try(act: Callable[[], Result]) -> Result | None:
    try:
        return act()
    except Exception as error:
        log.error("core_raised_again", error=repr(error), exc_info=error)
        return None
