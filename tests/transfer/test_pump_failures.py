from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from kvoffload.model.errors import CopyError, DeviceLost
from kvoffload.testing import wait_all_blocked
from tests.captured_logs import capture_logs
from tests.transfer.rig import DONE, FAILED, TIMEOUT_S, Rig, load, running, store

pytestmark = pytest.mark.asyncio


def break_copy(rig: Rig, fault: str) -> None:
    """Make the first copy fail, unless the fault is one of its start."""
    if fault == "ticket":
        rig.copier.tickets[0].fail()
    if fault == "query":
        rig.copier.tickets[0].query_error = CopyError("device lost")
    if fault == "tear":
        rig.copier.tickets[0].tear()


@pytest.mark.parametrize("hand_in", ["load", "store"])
@pytest.mark.parametrize("fault", ["fence", "submit", "ticket", "query", "tear"])
async def test_an_error_of_the_copier_fails_only_its_job(rig: Rig, hand_in: str, fault: str) -> None:
    if fault == "fence":
        rig.copier.refuse_fence(CopyError("no event"))
    if fault == "submit":
        rig.copier.refuse_submit(CopyError("no stream"))
    with capture_logs() as logs:
        await hand_in_one(rig, hand_in, 1)
        break_copy(rig, fault)
        (report,) = rig.reports()
    assert (report.job, report.outcome, report.copied_bytes) == (1, FAILED, 0)
    assert [entry["log_level"] for entry in logs] == ["error"]
    rig.copier.hold()
    await hand_in_one(rig, hand_in, 2)
    rig.copier.release()
    assert rig.outcomes() == {2: DONE}


@pytest.mark.parametrize("hand_in", ["load", "store"])
@pytest.mark.parametrize("fault", ["submit", "ticket", "query", "tear"])
async def test_of_jobs_that_are_copied_together_only_the_bad_one_fails(
    rig: Rig, hand_in: str, fault: str
) -> None:
    jobs = [(load if hand_in == "load" else store)(number, [number], [number]) for number in (1, 2)]
    hand_over = rig.pump.submit_loads if hand_in == "load" else rig.pump.submit_stores
    if fault == "submit":
        rig.copier.refuse_submit(CopyError("no stream"))
    with capture_logs() as logs:
        hand_over(jobs)
        await rig.clock.advance(0.01)
        break_copy(rig, fault)
        assert rig.outcomes() == {}
        good, bad = rig.copier.tickets[-2:]
        good.finish()
        bad.fail()
        found = rig.outcomes()
    assert found == {1: DONE, 2: FAILED}
    assert (good.runs.total_bytes, bad.runs.total_bytes) == (96, 96)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [
        "copy_not_submitted" if fault == "submit" else "copied_one_by_one"
    ]


@pytest.mark.parametrize("why", ["it has timed out", "the device is lost"])
async def test_a_failed_batch_is_not_copied_again_in_parts(rig: Rig, why: str) -> None:
    rig.pump.submit_loads([load(1, [1], [1]), load(2, [2], [2])])
    with capture_logs():
        if why == "it has timed out":
            await rig.clock.advance(TIMEOUT_S + 1)
            rig.copier.tickets[0].fail()
            await rig.clock.advance(TIMEOUT_S)
        else:
            rig.copier.tickets[0].query_error = DeviceLost("an illegal address")
        assert rig.outcomes() == {1: FAILED, 2: FAILED}
    assert len(rig.copier.tickets) == 1


async def test_a_load_records_its_own_fence_if_the_steps_fence_was_refused() -> None:
    rig = Rig()
    await rig.arena.prepare()
    rig.copier.refuse_fence(CopyError("no event"))
    with capture_logs() as logs:
        fence = rig.pump.fence()
    assert [entry["event"] for entry in logs] == ["fence_refused"]
    rig.pump.submit_loads([load(1, [1], [1])], fence)
    assert rig.copier.tickets[0].fences == (1,)


async def hand_in_one(rig: Rig, kind: str, number: int) -> None:
    if kind == "load":
        rig.pump.submit_loads([load(number, [1], [1])])
    else:
        rig.pump.submit_stores([store(number, [1], [1])])
        await rig.clock.advance(0.01)


@pytest.mark.parametrize(
    ("slots", "blocks", "reason"),
    [
        (["one"], [None], "slot 'one' is not among the 16"),
        ([0, 1, 2], [0, 1.5, -1], "block 1.5 is not among the 8"),
        ([16], [0], "slot 16 is not among the 16"),
        ([-1], [0], "slot -1 is not among the 16 that exist, which are numbered from 0"),
        ([1, 0], [0, -2], "block -2 is not among the 8"),
        ([0], [1 << 64], "block 18446744073709551616 is not among the 8"),
        ([0], [8], "block 8 is not among the 8"),
        ([0, 1], [0], "2 slots do not pair with 1 blocks"),
        ([], [], "0 slots do not pair with 0 blocks"),
    ],
)
async def test_only_an_impossible_job_fails(
    rig: Rig, slots: list[Any], blocks: list[Any], reason: str
) -> None:
    rig.copier.release()
    bad_load, bad_store = (
        replace(job, slots=tuple(slots), targets=tuple(blocks))
        for job in (load(1, [0], [0]), store(3, [0], [0]))
    )
    with capture_logs() as logs:
        rig.pump.submit_loads([bad_load, load(2, [1], [1])])
        rig.pump.submit_stores([bad_store, store(4, [2], [2])])
        await wait_all_blocked()
    assert rig.outcomes() == {1: FAILED, 2: DONE, 3: FAILED, 4: DONE}
    assert [reason in entry["reason"] for entry in logs] == [True, True]


async def test_a_slot_that_is_not_ready_yet_is_refused() -> None:
    rig = Rig()
    with capture_logs():
        rig.pump.submit_loads([load(1, [0], [0])])
    assert rig.outcomes() == {1: FAILED}


async def test_when_one_part_of_a_store_fails_the_rest_is_not_started(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, range(8), range(8)), store(2, [9], [1])])
    await wait_all_blocked()
    first, second = rig.copier.tickets
    with capture_logs():
        first.fail()
        await rig.clock.advance(0.1)
    assert rig.outcomes() == {}  # the job's second part is still running
    # a batch of the next job; the rest of the failed job is not copied
    assert rig.copier.tickets[2].runs.total_bytes == 96
    second.finish()
    assert rig.outcomes() == {1: FAILED}
    rig.copier.release()
    await rig.clock.advance(0.1)
    assert rig.outcomes() == {2: DONE}


async def test_a_job_whose_later_part_is_refused_ends_after_its_earlier_parts(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, range(5), range(5))])
    await wait_all_blocked()
    rig.copier.refuse_submit(CopyError("no stream"))
    rig.copier.tickets[0].finish()
    with capture_logs():
        await rig.clock.advance(0.1)
    assert rig.outcomes() == {}
    rig.copier.tickets[1].finish()
    assert rig.outcomes() == {1: FAILED}


async def test_a_copy_that_never_ends_is_abandoned_and_delays_no_other_copy() -> None:
    rig = Rig(blocks_in_flight=1)
    async with running(rig):
        rig.pump.submit_stores([store(1, [1], [1]), store(2, [2], [2])])
        rig.pump.submit_loads([load(3, [3], [3])])
        await wait_all_blocked()
        assert len(rig.copier.tickets) == 2
        with capture_logs() as logs:
            await rig.clock.advance(TIMEOUT_S + 1)
        assert [entry["event"] for entry in logs] == ["copy_abandoned", "copy_abandoned"]
        rig.copier.tickets[2].finish()
        await rig.clock.advance(0.1)
        assert rig.outcomes() == {2: DONE}
        now, turns = rig.counts, rig.pump.turns
        assert (now.abandoned_batches, now.open_jobs, now.store_bytes_in_flight) == (2, 2, 0)
        assert not rig.has_work
        await rig.clock.advance(3600)
        assert rig.pump.turns == turns  # the coroutine does not even poll
        for ticket in rig.copier.open_tickets:
            ticket.finish()
        with capture_logs() as logs:
            assert rig.outcomes() == {1: DONE, 3: DONE}
        assert [entry["event"] for entry in logs] == ["copy_ended_late", "copy_ended_late"]


async def test_hooks_rarely_query_an_abandoned_copy(rig: Rig) -> None:
    rig.pump.submit_loads([load(1, [1], [1])])
    with capture_logs():
        await rig.clock.advance(TIMEOUT_S + 1)
    asked = rig.copier.tickets[0].queries
    for _ in range(100):
        assert rig.outcomes() == {}
    assert rig.copier.tickets[0].queries <= asked + 1


async def test_the_hook_does_the_coroutines_work_after_the_coroutine_has_ended() -> None:
    rig = Rig(blocks_in_flight=1)
    async with running(rig):
        rig.pump.submit_stores([store(1, [1], [1]), store(2, [2], [2])])
        await wait_all_blocked()
        rig.clock.sleep = None  # type: ignore[assignment,method-assign]  # the next call of it raises
        with capture_logs() as logs:
            rig.copier.tickets[0].copy_seconds = 0.0
            await rig.clock.advance(1.0)
            await asyncio.wait([rig.task])
        assert isinstance(rig.task.exception(), TypeError)
        assert [entry["event"] for entry in logs] == ["transfer_coroutine_died", "job_failed"]
        assert rig.pump._gone
        assert rig.outcomes() == {2: FAILED}
        rig.copier.tickets[0].finish()
        assert rig.outcomes() == {1: DONE}
        with capture_logs() as logs:
            rig.pump.submit_stores([store(3, [3], [3])])
        assert "died" in logs[0]["reason"]
        assert rig.outcomes() == {3: FAILED}
        rig.pump.submit_loads([load(4, [4], [4])])
        rig.copier.tickets[1].finish()
        assert rig.outcomes() == {4: DONE}


async def test_when_the_loop_has_ended_the_hook_fails_waiting_jobs() -> None:
    rig = Rig()
    await rig.arena.prepare()
    rig.pump.submit_stores([store(1, [1], [1])])
    assert rig.outcomes() == {}
    with capture_logs() as logs:
        rig.pump.coroutine_lost("the portal's thread is gone")
        rig.pump.coroutine_lost("again")
    assert [entry["event"] for entry in logs] == ["transfer_coroutine_lost", "job_failed"]
    assert rig.outcomes() == {1: FAILED}
    rig.assert_nothing_held()


async def test_closing_the_loop_of_a_running_coroutine_is_noticed() -> None:
    rig = Rig()
    await rig.arena.prepare()
    coroutine = rig.pump.run()

    async def one_turn() -> None:
        coroutine.send(None)

    def run_and_drop() -> None:
        asyncio.run(one_turn())
        coroutine.close()

    with capture_logs():
        await asyncio.to_thread(run_and_drop)
        assert rig.pump._gone
        rig.pump.submit_stores([store(1, [1], [1])])
    assert rig.outcomes() == {1: FAILED}


async def test_a_job_submitted_while_the_coroutine_ends_is_still_reported() -> None:
    rig = Rig()
    await rig.arena.prepare()
    rig.pump.submit_stores([store(1, [1], [1])])
    rig.pump._gone = "died just now"
    with capture_logs():
        assert rig.outcomes() == {1: FAILED}


# -- cancellation and closing -----------------------------------------------------------------------------------------


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
