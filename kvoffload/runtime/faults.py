"""Audits the core, and switches offloading off when the core raises (R12).

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
from kvoffload.model.facts import InvariantBroken
from kvoffload.runtime.copies import OpenCopies
from kvoffload.runtime.observation import Observation

Result = TypeVar("Result")

log = get_logger("scheduler")


class Faults:
    """Audits the core, and handles the core's exceptions.

    Args:
        core: the core.
        bus: dispatches facts to the core.
        copies: the open copies, with the blocks that workers may still copy.
        device: the engine's block pool.
        observation: counts audits, and records whether `OffloadingDegraded` was published.
    """

    def __init__(
        self,
        core: OffloadCore,
        bus: Bus,
        copies: OpenCopies,
        device: BlockPool,
        observation: Observation,
    ) -> None:
        self._core = core
        self._bus = bus
        self._copies = copies
        self._device = device if isinstance(device, AuditsLeases) else None
        self._observation = observation
        self.cause: DegradeCause | None = None
        """Why offloading is off; None while it is on."""
        self.error: str | None = None
        """What the core was doing when it raised, and the exception; None if it has not raised."""
        self.pending_error: tuple[Exception, str] | None = None
        """An exception that the core raised on another thread.

        The engine's thread handles the exception in the next step.
        """
        bus.handle(InvariantBroken, self._invariant_broken)
        bus.on_state_error = lambda error, fact: self.raised(error, type(fact).__name__)

    # -- a core that raises -------------------------------------------------------------------------------------

    def ask(self, name: str, question: Callable[[], Result], otherwise: Result) -> Result:
        """Call `question` and return its result, or `otherwise` if the core raises now or has raised before."""
        if self.error is None:
            try:
                return question()
            except Exception as error:
                self.raised(error, name)
        return otherwise

    def raised(self, error: Exception, doing: str) -> None:
        """Stop using the core after the current batch. Ignore later exceptions, which follow from the first."""
        if self.error is None:
            log.error("core_raised", error=repr(error), doing=doing, exc_info=error)
            self.error = f"{doing}: {error!r}"
            self._bus.afterwards(self._cut_off)

    def release_loose(self) -> None:
        """Release leased blocks that no worker copies any more."""
        leases = self._core.state.leases
        loose = Counter(leases.counts) - self._copies.blocks()
        if loose:
            _try(lambda: leases.release([*loose.elements()]))

    def _invariant_broken(self, fact: InvariantBroken) -> None:
        """Record the cause, and switch off the core."""
        if self.cause is None:
            self.cause = fact.cause
        self._core.invariant_broken(fact)

    def _cut_off(self) -> None:
        """Switch off the core, remove it from the bus, and release blocks that no worker copies any more."""
        cause, detail = DegradeCause.HANDLER_RAISED, self.error or ""
        self._bus.publish(InvariantBroken(cause, detail))
        self._bus.drop_handlers()
        for event in _try(lambda: self._core.state.tally.take(everything=True)) or []:
            self._bus.publish(event)
        if not self._observation.saw_degradation:
            self._bus.publish(OffloadingDegraded(cause, detail))
        self._copies.forget_events()
        self.release_loose()

    # -- audits -------------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Return a line for each problem found. Call this method between hooks.

        The cost does not grow with the pool.
        """
        problems: list[str] = self.ask("audit", lambda: [*self._core.audit(), *self._engine_problems()], [])
        if self.error is not None:
            return self._problems_of_a_broken_core()
        self._observation.counters.add("kvoffload_audits_total")
        if problems:
            self._bus.publish(InvariantBroken(DegradeCause.INVARIANT_BROKEN, "; ".join(problems)))
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
