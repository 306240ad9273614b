"""The limit on stores in flight falls when stores overlap with a load or run slowly, and rises again afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.model.wire import Direction
from kvoffload.testing import GatedCopier, wait_all_blocked
from kvoffload.transfer.lanes import Batch
from kvoffload.transfer.runs import CopyRuns
from kvoffload.transfer.store_queue import StoreQueue
from tests.transfer.counts import statistics_of
from tests.transfer.rig import DONE, Rig, load, running, store

MIB = 2**20
_NOTHING = CopyRuns(*(np.empty(0, np.int64) for _ in range(3)))
CEILING, FLOOR, STEP = 64 * MIB, 8 * MIB, 8 * MIB


class Flow:
    """Ends one batch of 8 MiB per second, whose copies have 64 KiB each."""

    def __init__(self, ceiling: int = CEILING, slot_bytes: int = MIB) -> None:
        self.queue = StoreQueue(ceiling, slot_bytes)
        self.now = 0.0

    def end(
        self,
        gb_s: float = 10.0,
        *,
        size: int = 8 * MIB,
        piece: int = 64 * 1024,
        load: bool = False,
        age: float = 0.5,
    ) -> int:
        self.now += 1.0
        ticket = GatedCopier(held=False).submit(Direction.STORE, _NOTHING, ())
        batch = Batch(ticket, (), size, max(size // piece, 1), self.now - age, size / (gb_s * 1e9))
        self.queue.batch_ended(batch, self.now, is_load_pending=load)
        return int(self.queue.limit.value)


def test_it_begins_at_its_ceiling_and_never_leaves_its_range() -> None:
    flow = Flow()
    assert flow.queue.limit.value == CEILING
    assert flow.end() == CEILING
    assert [flow.end(load=True) for _ in range(5)] == [32 * MIB, 16 * MIB, 8 * MIB, FLOOR, FLOOR]
    assert [flow.end() for _ in range(8)] == [*range(FLOOR + STEP, CEILING + 1, STEP), CEILING]


def test_what_was_submitted_before_a_cut_makes_no_second_one() -> None:
    flow = Flow()
    assert flow.end(load=True) == 32 * MIB
    assert flow.end(load=True, age=1.5) == 32 * MIB
    assert flow.end(load=True, age=0.5) == 16 * MIB


def test_a_batch_at_half_of_the_best_speed_cuts_and_one_a_little_slower_does_not() -> None:
    flow = Flow()
    assert [flow.end(gb_s) for gb_s in (10.0, 6.0, 4.0)] == [CEILING, CEILING, 32 * MIB]
    assert flow.end(9.0) == 40 * MIB


def test_a_slower_way_is_recognized_after_a_while() -> None:
    flow = Flow()
    flow.end(10.0)
    found = [flow.end(2.0) for _ in range(120)]
    assert min(found) == FLOOR
    assert found[-1] == CEILING


def test_short_copies_are_not_measured_by_long_ones_nor_small_batches_at_all() -> None:
    flow = Flow()
    flow.end(50.0, piece=8 * MIB)
    assert flow.end(5.0, piece=4096) == CEILING
    flow.end(5.0, piece=8 * MIB, size=3 * MIB)
    assert flow.queue.limit.value == CEILING


def test_a_wait_for_the_interpreters_lock_in_a_long_batchs_time_cuts_nothing() -> None:
    """Between the driver calls for a batch of many copies, the thread may wait for the GIL, and the device
    waits for the thread.
    """
    flow = Flow()
    assert [flow.end(gb_s, piece=4096) for gb_s in (10.0, 1.0)] == [CEILING, CEILING]
    assert flow.end(0.5, piece=4096) == 32 * MIB  # no wait for the GIL takes that long


def test_an_unmeasured_duration_says_nothing() -> None:
    flow = Flow()
    assert flow.end(float("inf")) == CEILING


@pytest.mark.parametrize("blocks", [0.5, 1, 3])
def test_a_ceiling_of_a_few_blocks_is_its_own_floor(blocks: float) -> None:
    ceiling = int(blocks * MIB)
    flow = Flow(ceiling, MIB)
    assert flow.end(load=True) == max(ceiling // 2, min(ceiling, 2 * MIB))


@pytest.mark.asyncio
async def test_stores_that_met_a_load_hold_back_until_it_is_over() -> None:
    """Four batches of two blocks fit into the limit.

    The batches are small while a load is pending. Some batches after the load, they are large again.
    """
    rig = Rig(blocks_in_flight=8, slots=200)
    async with running(rig):
        assert statistics_of(rig.pump).store_bytes_bound == 8 * 96
        rig.pump.submit_loads([load(0, [0], [0])])
        rig.pump.submit_stores([store(1, range(1, 161), [block % 8 for block in range(160)])])
        await wait_all_blocked()
        assert statistics_of(rig.pump).store_bytes_in_flight == 8 * 96
        first = rig.copier.tickets[0]
        seen = []
        for _ in range(8):
            rig.copier.open_tickets[1].finish()
            await rig.clock.advance(0.01)
            seen.append(statistics_of(rig.pump).store_bytes_in_flight // 96)
        assert seen[-1] == 2
        assert seen == sorted(seen, reverse=True)
        assert first.is_open
        first.finish()
        while rig.copier.open_tickets and statistics_of(rig.pump).store_bytes_bound < 8 * 96:
            rig.copier.open_tickets[0].finish()
            await rig.clock.advance(0.01)
        assert statistics_of(rig.pump).store_bytes_bound == 8 * 96
        # enough stores are queued to fill the limit
        assert statistics_of(rig.pump).store_bytes_in_flight == 8 * 96
        rig.copier.release()
        await rig.clock.advance(0.1)
        assert rig.outcomes() == {0: DONE, 1: DONE}
        rig.assert_nothing_held()


@pytest.mark.asyncio
async def test_a_failed_batch_says_nothing_of_the_way() -> None:
    rig = Rig(blocks_in_flight=8)
    async with running(rig):
        rig.pump.submit_loads([load(0, [0], [0])])
        rig.pump.submit_stores([store(1, [1], [1])])
        await wait_all_blocked()
        rig.copier.tickets[1].fail()
        await rig.clock.advance(0.01)
        assert statistics_of(rig.pump).store_bytes_bound == 8 * 96


@pytest.mark.asyncio
async def test_a_report_contains_the_limit_on_stores() -> None:
    """The limit falls from four blocks to two after a store has overlapped with a load."""
    rig = Rig(blocks_in_flight=4)
    async with running(rig):
        rig.pump.submit_loads([load(0, [0], [0])])
        rig.pump.submit_stores([store(1, [1], [1])])
        await wait_all_blocked()
        rig.copier.tickets[1].finish()
        await rig.clock.advance(0.01)
        report = rig.pump.take_report()
        assert report is not None
        assert ([part.job for part in report.jobs], report.store_share) == ([1], 0.5)
        rig.copier.release()
