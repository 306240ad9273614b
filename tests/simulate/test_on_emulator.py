"""Runs simulations in which the shipped CUDA copier runs on the emulated driver, instead of the fake copier.

The emulator treats the engine's KV memory as device memory. The loop's timers run operations in a random
order, so that bytes are copied at any time between the submission and the end of a copy. With the counting
model, a wrong byte leads to a wrong token.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from typing import ClassVar

import numpy as np
import pytest

from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda.copier import CudaCopier, CudaTicket
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.ports import Fence, Ticket, TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.cuda_emulator import Emulator, Engine, build
from tests.simulate.campaign import play
from tests.simulate.copier import ChaosCopier, ChaosTicket, Odds
from tests.simulate.loop import SimLoop
from tests.simulate.simulation import Simulation, simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_DEVICES = 2


class EmulatedTicket(ChaosTicket):
    def __init__(self, copier: EmulatedCopier, direction: Direction, runs: CopyRuns, inside: Ticket) -> None:
        super().__init__(copier, direction, runs)
        self._inside = inside

    @property
    def is_started(self) -> bool:  # type: ignore[override]
        return self._inside.is_started

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


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(build())


@pytest.mark.parametrize("seeds", [30, pytest.param(200, marks=pytest.mark.full)])
def test_seeds_pass_and_cover_every_kind_of_event(emulator: Emulator, seeds: int) -> None:
    total = Counter[str]()
    for seed in range(seeds):
        result = play(seed, partial(simulate_on, emulator))
        assert result.problem is None, f"seed {seed}\n{result.trace}\n{emulator.report}"
        total += result.numbers
    assert min(total[what] for what in ("steps", "copies", "stored", "loaded", "requests")) > seeds, total
    assert emulator.calls("cuMemcpyBatchAsync") > 0


def test_a_seed_repeats(emulator: Emulator) -> None:
    found = []
    for _ in range(2):
        result = play(9, partial(simulate_on, emulator))
        found.append((result, emulator.executed))
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_one_of_the_first_seeds_detects_batches_without_an_end_event(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaTicket, "end", lambda self: setattr(self, "_has_end", True))
    child = os.fork()  # without end events, copies reach freed memory, which may crash the process
    if child == 0:
        os._exit(any(play(seed, partial(simulate_on, emulator)).problem for seed in range(40)))
    assert os.waitpid(child, 0)[1] != 0


def test_a_copy_that_reaches_freed_memory_is_reported_without_a_crash(emulator: Emulator) -> None:
    emulator.reset(stepped=True)
    emulator.accept_pageable()
    engine, memory = Engine(emulator, 0, blocks=1), mmap(-1, 4096)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    source, target, size = (np.array([value], np.int64) for value in (start, start + 64, 64))
    copier = CudaCopier(NvidiaDriver("cuda:0", lambda: engine.stream))
    copier.submit(Direction.STORE, CopyRuns(source, target, size), [copier.fence()])
    memory.close()
    emulator.step()
    assert emulator.faults == 1
