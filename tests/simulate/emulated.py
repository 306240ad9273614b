"""Simulations in which the shipped CUDA copier runs on the emulated driver, instead of the fake copier.

The emulator treats the engine's KV memory as device memory. The loop's timers run operations in a random
order, so that bytes are copied at any time between the submission and the end of a copy. With the counting
model, a wrong byte leads to a wrong token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvoffload.model.errors import CopyError
from kvoffload.transfer.cuda.copier import CudaCopier
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.ports import TicketState
from tests.cuda_emulator import Emulator, Engine
from tests.simulate.copier import ChaosCopier, ChaosTicket, Odds
from tests.simulate.simulation import Simulation, simulate

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from kvoffload.model.wire import Direction
    from kvoffload.transfer.ports import Fence, Ticket
    from kvoffload.transfer.runs import CopyRuns
    from tests.simulate.loop import SimLoop

_DEVICES = 2


class EmulatedTicket(ChaosTicket):
    def __init__(self, copier: EmulatedCopier, direction: Direction, runs: CopyRuns, inside: Ticket) -> None:
        super().__init__(copier, direction, runs)
        self._inside = inside

    @property
    def copy_seconds(self) -> float | None:
        return self._inside.copy_seconds

    def query(self) -> TicketState:
        self._copier.switch()
        if self.is_open:
            self._state = self._inside.query()
        return self._state

    def move(self, pieces: slice) -> None:
        """Do nothing: the emulator copies the bytes."""

    def end(self, state: TicketState, *, explodes: bool = False) -> None:
        """Do nothing: the emulator ends the batch."""


class EmulatedCopier(ChaosCopier):
    """The copier of one rank. Of the faults in `odds`, it causes refusals, failing queries and hangs."""

    emulator: ClassVar[Emulator]
    ranks: ClassVar[int] = 0

    def __init__(
        self, loop: SimLoop, draws: random.Random, odds: Odds, switch: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(loop, draws, odds, switch)
        device = EmulatedCopier.ranks % _DEVICES
        EmulatedCopier.ranks += 1
        engine = Engine(self.emulator, device, blocks=1)
        self._inside = CudaCopier(NvidiaDriver(f"cuda:{device}", lambda: engine.stream))

    def fence(self) -> Fence:
        super().fence()
        return self._inside.fence()

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> ChaosTicket:
        fate = self._fate()
        if fate == "hang" or direction in self._hung:
            return super().submit(direction, runs, fences)
        if self._draws.random() < self.odds.refuse:
            raise CopyError("refused")
        if fate in ("fail", "tear"):
            self.emulator.limit_batches(self._draws.randint(0, max(len(runs) - 1, 0)))
        inside = self._inside.submit(direction, runs, fences)
        self.emulator.limit_batches(-1)
        if fate == "explode":
            self.emulator.fail("cuEventQuery", 900, times=self._draws.randint(1, 3))
        ticket = EmulatedTicket(self, direction, runs, inside)
        self.tickets.append(ticket)
        late = self.odds.timeout_s * self._draws.choice([0.9, 1.1, 2.0]) if fate == "late" else 0.0
        self._run_on(late + self._draws.uniform(0, self.odds.usual_s))
        self.switch()
        return ticket

    def close(self) -> None:
        self._inside.close()

    def release(self) -> None:
        super().release()
        self.emulator.step()

    def _run_on(self, seconds: float) -> None:
        """Run a few operations after this delay; repeat until no operation is left."""

        def run() -> None:
            count = self._draws.randint(1, 8)
            if self.emulator.step(count) == count:
                self._run_on(self._draws.uniform(0, self.odds.usual_s))

        self._loop.call_later(max(seconds, 1e-6), run)


def simulate_on(emulator: Emulator, seed: int) -> Simulation:
    """Run one seed on the emulator.

    Raises:
        Exception: a rule was broken, or there was a race.
    """
    emulator.reset(stepped=True, seed=seed)
    emulator.accept_pageable()
    EmulatedCopier.emulator, EmulatedCopier.ranks = emulator, 0
    played = simulate(seed, copier=EmulatedCopier)
    if emulator.races or emulator.faults:
        raise AssertionError(emulator.report)
    return played
