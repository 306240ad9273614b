from __future__ import annotations

import asyncio

import anyio
import pytest

from kvoffload.testing import wait_all_blocked
from tests.captured_logs import capture_logs
from tests.transfer.rig import DONE, FAILED, TIMEOUT_S, Rig, load, store

pytestmark = pytest.mark.asyncio


async def test_a_cancelled_pump_waits_for_pending_copies(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, range(8), range(8)), store(2, [9], [1])])
    rig.pump.submit_loads([load(3, [10], [2])])
    await wait_all_blocked()
    with capture_logs():
        rig.task.cancel()
        await rig.clock.advance(1.0)
        assert not rig.task.done()
        for ticket in rig.copier.open_tickets:
            ticket.finish()
        await rig.clock.advance(1.0)
    assert rig.task.cancelled()
    assert len(rig.copier.tickets) == 3
    assert rig.outcomes() == {1: FAILED, 2: FAILED, 3: DONE}


async def test_a_pump_in_a_cancelled_scope_does_not_busy_wait() -> None:
    rig = Rig()
    await rig.arena.prepare()
    rig.pump.submit_loads([load(1, [1], [1])])

    async def pass_time() -> None:
        await rig.clock.advance(0.5)
        rig.copier.release()
        await rig.clock.advance(0.5)

    async with anyio.create_task_group() as group:
        group.start_soon(rig.pump.run)
        await wait_all_blocked()
        group.cancel_scope.cancel()
        # This task is not in the task group, because the clock must continue after the cancellation.
        ticker = asyncio.create_task(pass_time())
    await ticker
    # 100 queries in 0.5 s with pauses of 5 ms, and some more after shorter pauses.
    assert rig.copier.tickets[0].queries < 150
    assert rig.outcomes() == {1: DONE}
    rig.assert_nothing_held()


async def test_close_releases_everything(rig: Rig) -> None:
    rig.pump.submit_loads([load(1, [1], [1])])
    closing = asyncio.create_task(rig.pump.close())
    await rig.clock.advance(0.1)
    assert (rig.copier.is_closed, rig.arena.ready_slots) == (False, 16)
    rig.copier.release()
    await rig.clock.advance(0.1)
    assert closing.done()
    assert (rig.copier.is_closed, rig.arena.ready_slots) == (True, 0)
    assert rig.outcomes() == {1: DONE}


async def test_close_keeps_memory_under_a_running_copy_and_reports_it(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, [1], [1])])
    await wait_all_blocked()
    rig.task.cancel()
    closing = asyncio.create_task(rig.pump.close())
    with capture_logs() as logs:
        await rig.clock.advance(TIMEOUT_S + 1)
    assert closing.done()
    assert rig.task.cancelled()
    assert [entry["event"] for entry in logs] == ["copy_abandoned", "host_memory_kept"]
    assert (rig.copier.is_closed, rig.arena.ready_slots) == (True, 16)


async def test_a_closing_pump_takes_no_more_jobs(rig: Rig) -> None:
    await rig.pump.drain()
    with capture_logs() as logs:
        rig.pump.submit_loads([load(1, [1], [1])])
        rig.pump.submit_stores([store(2, [1], [1])])
    assert [entry["reason"] for entry in logs] == ["the pump is closing"] * 2
    assert rig.outcomes() == {1: FAILED, 2: FAILED}
    assert rig.copier.tickets == []


async def test_drain_returns_unfinished_jobs_and_propagates_its_cancellation(rig: Rig) -> None:
    rig.pump.submit_loads([load(1, [1], [1])])
    draining = asyncio.create_task(rig.pump.drain())
    await wait_all_blocked()
    draining.cancel()
    with capture_logs():
        await rig.clock.advance(TIMEOUT_S + 1)
    assert draining.cancelled()
    assert await rig.pump.drain() == 1
