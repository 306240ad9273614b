"""A pump with fake memory, copier, clock and executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import Rank
from kvoffload.model.wire import DeviceJob, Direction, JobReport
from kvoffload.testing import FakeClock, FakeDevice, GatedCopier, wait_all_blocked
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.factory import make_checksums
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.pump import TransferPump
from tests.copy_jobs import device_job
from tests.gates import ManualExecutor
from tests.transfer.counts import TransferStatistics, statistics_of

DONE, FAILED, CORRUPT = CopyOutcome.DONE, CopyOutcome.FAILED, CopyOutcome.CORRUPT
TIMEOUT_S = 2.0


def store(number: int, slots: Sequence[int], blocks: Sequence[int]) -> DeviceJob:
    return device_job(number, Direction.STORE, slots, blocks)


def load(number: int, slots: Sequence[int], blocks: Sequence[int]) -> DeviceJob:
    return device_job(number, Direction.LOAD, slots, blocks)


def ready_arena(device: FakeDevice, slots: int, chunk_slots: int = 1024) -> Arena:
    """Return an arena whose slots are ready, with `chunk_slots` of them in a chunk."""
    allocator = MmapAllocator(ManualExecutor(held=False))
    arena = Arena(device.layout, slots, allocator, chunk_bytes=chunk_slots * device.layout.slot_bytes)
    asyncio.run(arena.prepare())
    return arena


class CountedPump(TransferPump):
    turns = 0
    """how often the coroutine has woken up"""

    def _turn(self) -> bool:
        self.turns += 1
        return super()._turn()


class Rig:
    """A pump with eight device blocks of 96 bytes in two regions, and sixteen slots in chunks of five.

    With `verify`, checksums are computed when the test calls `rig.reader.run_next()`. `memory` allocates the
    host memory, by default at once.
    """

    task: asyncio.Task[Any]
    """the coroutine, once it runs"""

    def __init__(
        self,
        *,
        blocks_in_flight: float = 4,
        slots: int = 16,
        verify: str = "off",
        memory: ManualExecutor | None = None,
    ) -> None:
        self.device = FakeDevice(8, [64, 32])
        self.clock = FakeClock()
        self.copier = GatedCopier()
        size = self.device.layout.slot_bytes
        allocator = MmapAllocator(memory or ManualExecutor(held=False))
        self.arena = Arena(self.device.layout, slots, allocator, chunk_bytes=5 * size)
        self.reader = ManualExecutor()
        self.pump = CountedPump(
            Rank(0),
            self.arena,
            self.copier,
            self.clock,
            store_bytes_in_flight=int(blocks_in_flight * size),
            timeout_s=TIMEOUT_S,
            checksums=make_checksums(verify, self.arena, executor=self.reader),
        )

    def slot(self, slot: int) -> bytes:
        return b"".join(self.arena.pages(slot))

    def rot(self, slot: int, region: int = 0) -> None:
        self.arena.pages(slot)[region][7] ^= 1

    def reports(self) -> list[JobReport]:
        self.pump.poll()
        report = self.pump.take_report()
        return list(report.jobs) if report is not None else []

    def outcomes(self) -> dict[int, CopyOutcome]:
        return {report.job: report.outcome for report in self.reports()}

    @property
    def counts(self) -> TransferStatistics:
        return statistics_of(self.pump)

    def assert_nothing_held(self) -> None:
        assert self.counts == TransferStatistics(0, 0, 0, 0, 0, self.counts.store_bytes_bound)
        assert not self.has_work

    @property
    def has_work(self) -> bool:
        """Return whether copies are queued or pending, or a report is ready. Abandoned copies do not count."""
        return any(self.pump._lanes) or bool(self.pump._queue) or bool(self.pump._ledger._ended)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[None]:
    """Run the pump's coroutine. On exit, end open copies, stop the coroutine, and check that nothing is held."""
    await rig.arena.prepare()
    rig.task = asyncio.create_task(rig.pump.run())
    await wait_all_blocked()
    try:
        yield
    finally:
        rig.copier.release()
        rig.reader.release()
        rig.task.cancel()
        await rig.clock.advance(2 * TIMEOUT_S)
        await asyncio.gather(rig.task, return_exceptions=True)
    rig.reports()
    rig.assert_nothing_held()
