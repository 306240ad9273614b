from __future__ import annotations

import asyncio
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvoffload.model.errors import HostMemoryError, IllegalTransition
from kvoffload.model.wire import Direction
from kvoffload.testing import wait_all_blocked
from kvoffload.transfer.ports import TicketState
from tests.gates import ManualExecutor
from tests.transfer.rig import DONE, Rig, load, running, store

if TYPE_CHECKING:
    from kvoffload.transfer.pump import TransferPump

pytestmark = pytest.mark.asyncio


async def test_all_loads_of_a_step_are_submitted_at_once_in_one_batch() -> None:
    rig = Rig()
    await rig.arena.prepare()
    rig.pump.submit_loads([load(1, [1, 2], [1, 2]), load(2, [3], [3])])
    (ticket,) = rig.copier.tickets
    assert ticket.direction is Direction.LOAD
    assert ticket.runs.size.tolist() == [3 * 64, 3 * 32]  # copies of different jobs are merged, too
    assert ticket.fences == (1,)
    ticket.finish()
    assert rig.outcomes() == {1: DONE, 2: DONE}


async def test_the_fence_is_recorded_when_jobs_are_submitted() -> None:
    rig = Rig(blocks_in_flight=8)
    await rig.arena.prepare()
    rig.pump.submit_stores([store(1, [1], [1])])
    rig.pump.submit_stores([store(2, [2], [2])])
    assert (rig.copier.fences, rig.copier.tickets) == (2, [])
    async with running(rig):
        (ticket,) = rig.copier.tickets
        assert ticket.fences == (1, 2)  # a batch shared by two jobs waits for both fences


async def test_the_coroutine_does_not_sleep_while_parts_of_a_batch_are_left(rig: Rig) -> None:
    rig.pump.submit_loads([load(1, [1], [1])])
    (ticket,) = rig.copier.tickets
    query = ticket.query

    def start_a_part() -> TicketState:
        rig.copier.slices += rig.copier.slices < 50
        return query()

    ticket.query = start_a_part  # type: ignore[method-assign]
    await wait_all_blocked()  # this waits without letting time pass
    assert rig.copier.slices == 50


async def test_loads_start_before_waiting_stores(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, range(8), range(8))])
    await wait_all_blocked()
    rig.pump.submit_loads([load(2, [9], [7])])
    assert [ticket.direction.value for ticket in rig.copier.tickets] == ["store", "store", "load"]
    assert rig.counts.store_bytes_in_flight == 4 * 96
    rig.copier.tickets[2].finish()
    assert rig.outcomes() == {2: DONE}


async def test_stores_in_flight_stay_below_the_limit_and_a_long_job_is_split(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, range(5), range(5)), store(2, [10, 11], [5, 6])])
    await wait_all_blocked()
    assert [ticket.runs.total_bytes for ticket in rig.copier.tickets] == [192, 192]
    rig.copier.tickets[0].finish()
    await rig.clock.advance(0.1)
    assert rig.outcomes() == {}
    # the third batch contains the end of one job and the beginning of the next
    assert [ticket.runs.total_bytes for ticket in rig.copier.tickets] == [192, 192, 192]
    rig.copier.release()
    await rig.clock.advance(0.1)
    assert rig.outcomes() == {1: DONE, 2: DONE}
    assert [rig.slot(slot) for slot in (0, 4, 11)] == [rig.device.read(block) for block in (0, 4, 6)]


@pytest.mark.parametrize("bound", [0.5, 1, 1.5])
async def test_a_limit_below_two_blocks_allows_one_block_at_once(bound: float) -> None:
    rig = Rig(blocks_in_flight=bound)
    async with running(rig):
        rig.pump.submit_stores([store(1, [0, 1], [0, 1])])
        await wait_all_blocked()
        assert [ticket.runs.total_bytes for ticket in rig.copier.tickets] == [96]


async def test_only_the_oldest_ticket_of_a_lane_is_queried(rig: Rig) -> None:
    for number in range(3):
        rig.pump.submit_loads([load(number, [number], [number])])
    rig.copier.tickets[1].finish()
    rig.copier.tickets[2].finish()
    assert rig.outcomes() == {}
    assert [ticket.queries for ticket in rig.copier.tickets[1:]] == [0, 0]
    rig.copier.tickets[0].finish()
    assert list(rig.outcomes()) == [0, 1, 2]


async def test_an_idle_pump_neither_wakes_up_nor_queries(rig: Rig) -> None:
    before = rig.counts, rig.pump.turns
    await rig.clock.advance(3600)
    rig.pump.submit_loads([])
    rig.pump.submit_stores([])
    rig.pump.poll()
    await wait_all_blocked()
    assert (rig.counts, rig.pump.turns) == before
    assert (rig.clock.sleepers, rig.copier.fences) == (0, 0)


async def test_polls_become_rarer_while_no_copy_ends_and_stop_after_the_last(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, [1], [1])])
    await rig.clock.advance(0.02)
    early = rig.pump.turns
    await rig.clock.advance(1.0)
    late = rig.pump.turns - early
    assert late == pytest.approx(200, abs=2)  # the pump polled every 5 ms for a second
    rig.copier.release()
    await rig.clock.advance(1.0)
    rest = rig.pump.turns
    await rig.clock.advance(1.0)
    assert rig.pump.turns == rest


async def test_the_hook_does_not_wait_for_the_coroutine(rig: Rig) -> None:
    rig.pump.submit_loads([load(1, [1], [1])])
    rig.copier.tickets[0].finish()
    with rig.pump._reaping:  # This stands for the coroutine's thread, which may hold the lock.
        rig.pump.poll()
        rig.pump.submit_loads([load(2, [2], [2])])
        rig.pump.submit_stores([store(3, [3], [3])])
    assert len(rig.copier.tickets) == 2
    assert rig.outcomes() == {1: DONE}


async def test_a_report_contains_only_changes_and_the_bytes_and_seconds_of_ended_jobs() -> None:
    rig = Rig()
    assert rig.pump.take_report() is None
    async with running(rig):
        report = rig.pump.take_report()
        assert report is not None
        assert (report.jobs, report.ready_slots) == ((), 16)
        assert rig.pump.take_report() is None
        rig.pump.submit_stores([store(1, [1, 2], [1, 2])])
        await rig.clock.advance(0.5)
        turns = rig.pump.turns
        rig.copier.tickets[0].copy_seconds = 0.125
        rig.copier.tickets[0].finish()
        rig.clock.jump(0.5)
        (ended,) = rig.reports()
        assert rig.pump.turns == turns  # the hook noticed the end
        assert (ended.job, ended.copied_bytes, ended.copy_s) == (1, 192, 0.125)
        assert ended.queue_s == pytest.approx(0.875)
        assert not rig.has_work


async def test_submitting_a_job_twice_is_an_error(rig: Rig) -> None:
    with pytest.raises(IllegalTransition, match="transfer job 1 in state 'accepted'"):
        rig.pump.submit_loads([load(1, [1], [1]), load(1, [2], [2])])
    assert rig.copier.tickets == []
    rig.pump.submit_loads([load(1, [1], [1])])
    with pytest.raises(IllegalTransition, match="job 1 in"):
        rig.pump.submit_stores([store(2, [2], [2]), store(1, [1], [1])])
    rig.copier.release()
    assert rig.outcomes() == {1: DONE}
    with pytest.raises(IllegalTransition, match="job 1 in"):
        rig.pump.submit_loads([load(1, [1], [1])])
    rig.pump.submit_stores([store(2, [2], [2])])
    await rig.clock.advance(0.1)
    assert rig.outcomes() == {2: DONE}


async def test_ready_slots_are_reported_as_they_grow_until_memory_is_refused() -> None:
    memory = ManualExecutor()
    rig = Rig(memory=memory)
    growth = asyncio.create_task(rig.arena.prepare())
    await wait_all_blocked()
    assert rig.pump.take_report() is None  # before the first report, the scheduler assumes this state
    for grow, is_growing in ((memory.run_next, True), (partial(memory.lose_next, HostMemoryError()), False)):
        grow()
        await wait_all_blocked()
        report = rig.pump.take_report()
        assert report is not None
        assert (report.ready_slots, report.is_growing) == (5, is_growing)
    await growth
    await rig.pump.close()
    # the reported number of slots never decreases, even after the memory was freed
    assert rig.pump.take_report() is None


class PolledLock:
    """Polls the pump after each release, as a hook on another thread could just before the coroutine sleeps."""

    def __init__(self, pump: TransferPump) -> None:
        self._pump, self._lock = pump, Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
        self._pump.poll()


async def test_the_coroutine_starts_queued_stores_after_the_hook_noticed_an_end(rig: Rig) -> None:
    rig.copier.release()
    rig.pump._reaping = cast("Any", PolledLock(rig.pump))
    rig.pump.submit_stores([store(1, range(8), range(8))])
    await rig.clock.advance(0.1)
    assert rig.outcomes() == {1: DONE}
