from __future__ import annotations

import numpy as np
import pytest

from kvoffload.model.wire import Direction
from kvoffload.testing import GatedCopier, wait_all_blocked
from kvoffload.transfer.lanes import Batch
from kvoffload.transfer.runs import CopyRuns
from kvoffload.transfer.store_queue import StoreQueue
from tests.captured_logs import capture_logs
from tests.transfer.rig import DONE, Rig, load, running, store

MIB = 2**20
_NOTHING = CopyRuns(*(np.empty(0, np.int64) for _ in range(3)))
CEILING, FLOOR, STEP = 64 * MIB, 8 * MIB, 8 * MIB


class Flow:
    """Ends one batch of 8 MiB per second. Each batch has copies of 64 KiB."""

    def __init__(self, ceiling: int = CEILING, slot_bytes: int = MIB) -> None:
        self.queue = StoreQueue(ceiling, slot_bytes)
        self.now = 0.0

    def end(
        self, gb_s: float = 10, size: int = 8 * MIB, piece: int = 65536, load: bool = False, age: float = 0.5
    ) -> int:
        self.now += 1.0
        ticket = GatedCopier(held=False).submit(Direction.STORE, _NOTHING, ())
        batch = Batch(ticket, (), size, max(size // piece, 1), self.now - age, size / (gb_s * 1e9))
        self.queue.batch_ended(batch, self.now, is_load_pending=load)
        return int(self.queue.limit.value)


def test_the_limit_starts_at_its_maximum_and_stays_in_its_range() -> None:
    flow = Flow()
    assert flow.queue.limit.value == CEILING
    assert flow.end() == CEILING
    assert [flow.end(load=True) for _ in range(5)] == [32 * MIB, 16 * MIB, 8 * MIB, FLOOR, FLOOR]
    assert [flow.end() for _ in range(8)] == [*range(FLOOR + STEP, CEILING + 1, STEP), CEILING]


def test_batches_submitted_before_a_reduction_cause_no_second_reduction() -> None:
    flow = Flow()
    assert flow.end(load=True) == 32 * MIB
    assert flow.end(load=True, age=1.5) == 32 * MIB
    assert flow.end(load=True, age=0.5) == 16 * MIB


def test_a_batch_at_half_the_best_speed_reduces_the_limit_and_a_slightly_slower_one_does_not() -> None:
    flow = Flow()
    assert [flow.end(gb_s) for gb_s in (10.0, 6.0, 4.0)] == [CEILING, CEILING, 32 * MIB]
    assert flow.end(9.0) == 40 * MIB


def test_a_permanently_slower_link_is_recognized_after_some_batches() -> None:
    flow = Flow()
    flow.end()
    found = [flow.end(2.0) for _ in range(120)]
    assert min(found) == FLOOR
    assert found[-1] == CEILING


def test_short_copies_are_not_compared_with_long_ones_and_small_or_untimed_batches_are_ignored() -> None:
    flow = Flow()
    flow.end(50.0, piece=8 * MIB)
    assert flow.end(5.0, piece=4096) == CEILING
    flow.end(5.0, piece=8 * MIB, size=3 * MIB)
    flow.end(float("inf"), piece=8 * MIB)
    assert flow.queue.limit.value == CEILING


def test_a_wait_for_the_gil_during_a_long_batch_does_not_reduce_the_limit() -> None:
    flow = Flow()
    assert [flow.end(gb_s, piece=4096) for gb_s in (10.0, 1.0)] == [CEILING, CEILING]
    assert flow.end(0.5, piece=4096) == 32 * MIB  # No wait for the GIL takes that long.


@pytest.mark.parametrize("blocks", [0.5, 1, 3])
def test_a_maximum_of_a_few_blocks_is_also_the_minimum(blocks: float) -> None:
    ceiling = int(blocks * MIB)
    flow = Flow(ceiling, MIB)
    assert flow.end(load=True) == max(ceiling // 2, min(ceiling, 2 * MIB))


@pytest.mark.asyncio
async def test_stores_are_small_while_a_load_is_pending_and_grow_afterwards() -> None:
    rig = Rig(blocks_in_flight=8, slots=200)
    async with running(rig):
        assert rig.counts.store_bytes_bound == 8 * 96
        rig.pump.submit_loads([load(0, [0], [0])])
        rig.pump.submit_stores([store(1, range(1, 161), [block % 8 for block in range(160)])])
        await wait_all_blocked()
        assert rig.counts.store_bytes_in_flight == 8 * 96
        first = rig.copier.tickets[0]
        seen = []
        for _ in range(8):
            rig.copier.open_tickets[1].finish()
            await rig.clock.advance(0.01)
            seen.append(rig.counts.store_bytes_in_flight // 96)
        assert seen[-1] == 2
        assert seen == sorted(seen, reverse=True)
        assert first.is_open
        first.finish()
        while rig.copier.open_tickets and rig.counts.store_bytes_bound < 8 * 96:
            rig.copier.open_tickets[0].finish()
            await rig.clock.advance(0.01)
        assert rig.counts.store_bytes_bound == 8 * 96
        # enough stores are queued to fill the limit
        assert rig.counts.store_bytes_in_flight == 8 * 96
        rig.copier.release()
        await rig.clock.advance(0.1)
        assert rig.outcomes() == {0: DONE, 1: DONE}


@pytest.mark.asyncio
@pytest.mark.parametrize(("end", "share"), [("finish", 0.5), ("fail", 1.0)])
async def test_a_report_contains_the_limit_which_a_failed_batch_does_not_change(
    rig: Rig, end: str, share: float
) -> None:
    rig.pump.submit_loads([load(0, [0], [0])])
    rig.pump.submit_stores([store(1, [1], [1])])
    await wait_all_blocked()
    with capture_logs():
        getattr(rig.copier.tickets[1], end)()
        await rig.clock.advance(0.01)
    report = rig.pump.take_report()
    assert report is not None
    assert ([part.job for part in report.jobs], report.store_share) == ([1], share)
