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
from tests.copy_jobs import device_job
from tests.gates import ManualExecutor
from tests.transfer.counts import CountedPump, statistics_of

DONE, FAILED, CORRUPT = CopyOutcome.DONE, CopyOutcome.FAILED, CopyOutcome.CORRUPT
TIMEOUT_S = 2.0


def store(number: int, slots: Sequence[int], blocks: Sequence[int]) -> DeviceJob:
    return device_job(number, Direction.STORE, slots, blocks)


def load(number: int, slots: Sequence[int], blocks: Sequence[int]) -> DeviceJob:
    return device_job(number, Direction.LOAD, slots, blocks)


class Rig:
    """A pump with eight device blocks of 96 bytes in two regions, and sixteen slots in chunks of five.

    At most four blocks are in flight. With `verify`, checksums are computed when the test calls
    `rig.reader.run_next()`. `memory` allocates the host memory, by default at once.
    """

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
        self.arena = Arena(
            self.device.layout,
            slots,
            MmapAllocator(memory or ManualExecutor(held=False)),
            chunk_bytes=5 * size,
        )
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
        return self.arena.pages(slot)[0].tobytes() + self.arena.pages(slot)[1].tobytes()

    def rot(self, slot: int, region: int = 0) -> None:
        self.arena.pages(slot)[region][7] ^= 1

    def reports(self) -> list[JobReport]:
        self.pump.poll()
        report = self.pump.take_report()
        return list(report.jobs) if report is not None else []

    def outcomes(self) -> dict[int, CopyOutcome]:
        return {report.job: report.outcome for report in self.reports()}

    def assert_nothing_held(self) -> None:
        now = statistics_of(self.pump)
        held = (now.open_jobs, now.queued_stores, now.pending_batches, now.abandoned_batches)
        assert held == (0, 0, 0, 0)
        assert now.store_bytes_in_flight == 0
        assert not self.has_work

    @property
    def has_work(self) -> bool:
        """Return whether copies are queued or pending, or a report is ready. Abandoned copies do not count."""
        return any(self.pump._lanes) or bool(self.pump._queue) or bool(self.pump._ledger._ended)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[asyncio.Task[Any]]:
    """Run the pump's coroutine. On exit, end open copies and stop the coroutine."""
    await rig.arena.prepare()
    task = asyncio.create_task(rig.pump.run())
    await wait_all_blocked()
    try:
        yield task
    finally:
        rig.copier.release()
        rig.reader.release()
        task.cancel()
        await rig.clock.advance(2 * TIMEOUT_S)
        await asyncio.gather(task, return_exceptions=True)
