"""Runs a simulated engine with kvoffload's worker side. `Life` uses an emulated device, `Steps` any device.

The engine's kernels write and read blocks. The engine enqueues each step before the previous step has ended,
in the order of vLLM's model runners: zeroing of blocks, `begin_step`, the forward pass, loads, stores. The
engine does what the scheduler's side guarantees: it uses no block or slot of an open job, and reads a loaded
block only after the load was reported. The worker's side must follow all other rules. If it breaks one, the
checks find a race or wrong bytes.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Protocol

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import Rank
from kvoffload.model.wire import DeviceJob, Direction, TransferPlan
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.testing import FakeClock
from kvoffload.transfer import factory
from tests.copy_jobs import device_job
from tests.cuda_emulator import Emulator, Engine
from tests.runtime.manual_portal import ManualPortal

if TYPE_CHECKING:
    import pytest

BLOCKS, SLOTS = 48, 64
ZERO = 0
TIMEOUT_S = 1e6


class KernelEngine(Protocol):
    """An engine whose kernels write and read blocks. A read of unexpected contents counts as an error."""

    def enter(self) -> None: ...
    def write(self, block: int, seed: int) -> None: ...
    def read(self, block: int, seed: int) -> None: ...
    def synchronize(self) -> None: ...


class Steps:
    """Runs the steps of one rank. `step` enqueues a step, and `settle` waits until all jobs have ended.

    Args:
        engine: launches the kernels.
        side: the worker's side, already registered.
        seed: the seed of all random choices.
        blocks: the number of device blocks.
        slots: the number of host slots.
        most: the maximum number of blocks in a job.
    """

    def __init__(
        self, engine: KernelEngine, side: WorkerSide, seed: int, *, blocks: int, slots: int, most: int
    ) -> None:
        self.engine: KernelEngine = engine
        self.side, self.blocks, self.slots, self.most = side, blocks, slots, most
        self.draws = random.Random(seed)
        # For each device block, the seed of its contents. Blocks that a load is filling are left out.
        self.contents: dict[int, int] = {}
        # For each host slot whose store was reported, the seed of its contents.
        self.stored: dict[int, int] = {}
        self.open: dict[int, tuple[DeviceJob, tuple[int, ...]]] = {}
        self.outcomes: list[tuple[int, CopyOutcome]] = []
        self.jobs = 0
        self._seeds = 0

    def let_some_run(self) -> None:
        """Let the device run some operations. Not needed if the device runs on its own."""

    def let_all_run(self) -> None:
        """Let the device run all pending operations. Not needed if the device runs on its own."""

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Enqueue a step, let the streams run a random number of operations, and take the reports."""
        self.engine.enter()
        loads = [job for _ in range(self.draws.randint(0, 2)) if (job := self._load()) is not None]
        fresh = self._some(self._free_blocks(), self.draws.randint(1, self.most + 2))
        for block in fresh:
            self._seeds += 1
            self.contents[block] = self._seeds
        stores = [job for _ in range(self.draws.randint(0, 2)) if (job := self._store()) is not None]
        plan = TransferPlan(tuple(loads), tuple(stores))
        for block in (int(block) for job in loads for block in job.targets):
            self.engine.write(block, ZERO)
        self.side.begin_step(plan)
        for block in fresh:
            self.engine.write(block, self.contents[block])
        for block in self._some([*self.contents], self.most):
            self.engine.read(block, self.contents[block])
        self.side.start_loads(plan)
        self.side.start_stores(plan)
        self.let_some_run()
        self.take()
        for block in self._some(self._unleased(), self.most):
            del self.contents[block]  # The engine frees these blocks, and later steps may write to them.

    def take(self) -> None:
        """Take the worker's reports, as the scheduler's side does."""
        report = self.side.take_report()
        for part in report.jobs if report is not None else ():
            job, seeds = self.open.pop(part.job)
            self.outcomes.append((part.job, part.outcome))
            if part.outcome is not CopyOutcome.DONE:
                continue
            if job.direction is Direction.STORE:
                self.stored.update(zip(map(int, job.slots), seeds, strict=True))
            else:
                self.contents.update(zip(map(int, job.targets), seeds, strict=True))

    def settle(self) -> None:
        """Wait until all jobs have ended, then read every block."""
        while self.open:
            self.let_all_run()
            self.take()
        self.engine.enter()
        for block, seed in self.contents.items():
            self.engine.read(block, seed)
        self.engine.synchronize()

    @property
    def failed(self) -> list[int]:
        return [job for job, outcome in self.outcomes if outcome is not CopyOutcome.DONE]

    # -- choices ------------------------------------------------------------------------------------------------

    def _under_copy(self) -> set[int]:
        return {int(block) for job, _ in self.open.values() for block in job.targets}

    def _unleased(self) -> list[int]:
        busy = self._under_copy()
        return [block for block in self.contents if block not in busy]

    def _free_blocks(self) -> list[int]:
        busy = self._under_copy() | self.contents.keys()
        return [block for block in range(self.blocks) if block not in busy]

    def _some(self, among: list[int], most: int) -> list[int]:
        return self.draws.sample(among, min(len(among), most))

    def _load(self) -> DeviceJob | None:
        stores = [job for job, _ in self.open.values() if job.direction is Direction.STORE]
        busy = {int(slot) for job in stores for slot in job.slots}
        ready = [slot for slot in self.stored if slot not in busy]
        slots = self._some(ready, self.draws.randint(1, self.most))
        blocks = self._some(self._free_blocks(), len(slots))
        slots = slots[: len(blocks)]
        return self._job(Direction.LOAD, slots, blocks, [self.stored[slot] for slot in slots])

    def _store(self) -> DeviceJob | None:
        blocks = self._some(self._unleased(), self.draws.randint(1, self.most))
        busy = {int(slot) for job, _ in self.open.values() for slot in job.slots}
        slots = self._some([slot for slot in range(self.slots) if slot not in busy], len(blocks))
        for slot in slots:
            self.stored.pop(slot, None)
        seeds = [self.contents[block] for block in blocks]
        return self._job(Direction.STORE, slots, blocks[: len(slots)], seeds)

    def _job(self, way: Direction, slots: list[int], blocks: list[int], seeds: list[int]) -> DeviceJob | None:
        if not slots or not blocks:
            return None
        self.jobs += 1
        job = device_job(self.jobs, way, slots, blocks)
        self.open[self.jobs] = (job, tuple(seeds[: len(slots)]))
        return job


class Life(Steps):
    """Runs the steps of one rank on an emulated device.

    Args:
        emulator: the emulated driver.
        patch: replaces the function that asks torch for the current stream.
        seed: seed of all random choices.
        device: the device's number.
        is_stepped: whether the emulator's streams run in this thread, between two steps.
        timeout_s: the time limit of copies.
        options: further options of the engine.
    """

    engine: Engine

    def __init__(
        self,
        emulator: Emulator,
        patch: pytest.MonkeyPatch,
        seed: int,
        device: int = 0,
        *,
        is_stepped: bool = True,
        timeout_s: float = TIMEOUT_S,
        blocks: int = BLOCKS,
        slots: int = SLOTS,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.emulator, self.is_stepped = emulator, is_stepped
        engine = Engine(emulator, device, blocks, **options)
        self.clock = FakeClock()
        self.portal = ManualPortal(self.clock)
        patch.setattr(factory, "current_stream", lambda device: lambda: engine.stream)
        config = OffloadConfig(host_bytes=slots * engine.layout.slot_bytes, transfer_timeout_s=timeout_s)
        side = WorkerSide(Rank(0), 1, config, self.portal, clock=self.clock)
        assert side.register(engine.layout) == slots
        super().__init__(engine, side, seed, blocks=blocks, slots=slots, most=4)

    def let_some_run(self) -> None:
        if self.is_stepped:
            self.emulator.step(self.draws.randint(0, 80))
        if self.draws.random() < 0.5:
            self.portal.advance()

    def let_all_run(self) -> None:
        self.emulator.step()
        self.portal.advance()

    def close(self) -> None:
        self.side.close()
        self.portal.close()

    @property
    def problems(self) -> str:
        """Return a description of races, wrong bytes and failed jobs, or an empty string if there are none."""
        emulator = self.emulator
        if not (emulator.races or emulator.wrong or emulator.faults or self.failed):
            return ""
        return f"{emulator.races} races, {emulator.wrong} wrong, failed {self.failed[:5]}\n{emulator.report}"
