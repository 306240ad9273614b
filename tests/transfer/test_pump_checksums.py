from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvoffload.model.causes import CopyOutcome
from kvoffload.testing import wait_all_blocked
from tests.captured_logs import capture_logs
from tests.transfer.rig import CORRUPT, DONE, FAILED, TIMEOUT_S, Rig, load, running, store

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture(params=["sample", "full"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = Rig(verify=request.param)
    async with running(rig):
        yield rig


async def stored(rig: Rig, slots: list[int], blocks: list[int], number: int = 1) -> None:
    """Store blocks and compute their checksums. Hold later work of the copier and of the reader."""
    rig.copier.release()
    rig.pump.submit_stores([store(number, slots, blocks)])
    await rig.clock.advance(0.01)
    rig.reader.run_all()
    assert rig.outcomes() == {number: DONE}


def hand_in(rig: Rig, kind: str) -> None:
    """Submit job 2. A load reads slot 1, which `stored` has filled."""
    if kind == "store":
        rig.pump.submit_stores([store(2, [3], [3])])
    else:
        rig.pump.submit_loads([load(2, [1], [5])])


each = pytest.mark.parametrize("kind", ["store", "load"])


@each
async def test_a_job_is_reported_when_its_checksums_were_read_and_that_time_counts_as_queueing(
    rig: Rig, kind: str
) -> None:
    await stored(rig, [1], [1])
    rig.copier.hold()
    hand_in(rig, kind)
    await rig.clock.advance(0.01)
    (ticket,) = rig.copier.open_tickets
    assert ticket.fences == (2,)  # the hook's own fence; the first was that of `stored`
    ticket.copy_seconds = 0.25
    ticket.finish()
    rig.pump.poll()
    await rig.clock.advance(1.0)
    assert (rig.reports(), rig.has_work, rig.reader.waiting) == ([], True, 1)
    rig.reader.run_next()
    (report,) = rig.reports()
    assert (report.outcome, report.copy_s) == (DONE, 0.25)
    assert report.queue_s == pytest.approx(0.76)


async def test_a_load_of_corrupt_slots_is_corrupt_and_names_them(rig: Rig) -> None:
    await stored(rig, [1, 2, 3, 4], [1, 2, 3, 4])
    rig.rot(1, 0)
    rig.rot(3, 1)
    rig.pump.submit_loads([load(2, [1], [5]), load(3, [2, 3], [6, 7]), load(4, [4], [0])])
    with capture_logs() as logs:
        await rig.clock.advance(0.01)
        rig.reader.run_all()
        reports = {int(report.job): report for report in rig.reports()}
    assert {job: report.outcome for job, report in reports.items()} == {2: CORRUPT, 3: CORRUPT, 4: DONE}
    assert [reports[job].corrupt for job in (2, 3, 4)] == [(0,), (1,), ()]
    assert [reports[job].copied_bytes for job in (2, 3, 4)] == [0, 0, 96]
    assert [(entry["event"], entry["log_level"], entry["job"], entry["slots"]) for entry in logs] == [
        ("blocks_corrupt", "error", 2, [1]),
        ("blocks_corrupt", "error", 3, [3]),
    ]


async def test_bytes_changed_between_the_copy_and_the_check_are_detected(rig: Rig) -> None:
    await stored(rig, [1], [1])
    rig.pump.submit_loads([load(2, [1], [5])])
    rig.pump.poll()
    rig.rot(1)
    rig.reader.run_all()
    with capture_logs():
        assert rig.outcomes() == {2: CORRUPT}


async def test_the_next_batch_is_queried_while_checksums_are_computed(rig: Rig) -> None:
    await stored(rig, [1, 2], [1, 2])
    rig.copier.hold()
    for number in (2, 3, 4):
        rig.pump.submit_loads([load(number, [1], [3 + number])])
    for ticket in rig.copier.open_tickets[:2]:
        ticket.finish()
    assert rig.outcomes() == {}
    assert rig.reader.waiting == 2
    rig.reader.run_all()
    assert rig.outcomes() == {2: DONE, 3: DONE}


async def test_the_limit_on_stores_includes_checksums_except_those_of_abandoned_copies(rig: Rig) -> None:
    rig.pump.submit_stores([store(number, [number], [number]) for number in range(4)])
    with capture_logs():
        await rig.clock.advance(TIMEOUT_S * 1.1)
        rig.pump.submit_stores([store(number, [number], [number]) for number in range(4, 8)])
        await rig.clock.advance(0.05)
        assert rig.counts.abandoned_batches > 0
        assert rig.counts.store_bytes_in_flight == 4 * 96
        rig.copier.release()
        await rig.clock.advance(TIMEOUT_S / 2)
        # The copies of all eight stores have ended, and four of them were abandoned before.
        assert (rig.reader.waiting, len(rig.copier.open_tickets)) == (4, 0)
        assert rig.counts.store_bytes_in_flight == 4 * 96
        rig.reader.release()
        await rig.clock.advance(TIMEOUT_S)
        assert rig.outcomes() == dict.fromkeys(range(8), DONE)


@each
@pytest.mark.parametrize("fault", ["refuse", "raise"])
async def test_a_job_whose_checksums_cannot_be_read_fails(rig: Rig, kind: str, fault: str) -> None:
    await stored(rig, [1], [1])
    if fault == "refuse":
        rig.reader.refuse(RuntimeError("shut down"))
    hand_in(rig, kind)
    with capture_logs() as logs:
        await rig.clock.advance(0.01)
        if fault == "raise":
            rig.reader.lose_next(OSError("lost"))
        assert rig.outcomes() == {2: FAILED}
    assert [entry["event"] for entry in logs] == ["copy_failed"]
    await stored(rig, [3], [3], 3)


@each
async def test_checksums_that_never_end_are_abandoned_by_the_copys_timeout(rig: Rig, kind: str) -> None:
    await stored(rig, [1], [1])
    rig.copier.hold()
    hand_in(rig, kind)
    await rig.clock.advance(TIMEOUT_S * 0.75)
    rig.copier.release()
    with capture_logs() as logs:
        await rig.clock.advance(TIMEOUT_S * 0.5)
    assert [entry["event"] for entry in logs] == ["copy_abandoned"]
    assert (rig.reports(), rig.has_work) == ([], False)
    assert rig.counts.abandoned_batches == 1
    rig.reader.release()
    with capture_logs() as logs:
        rig.clock.jump(TIMEOUT_S)
        assert rig.outcomes() == {2: DONE}
    assert [entry["event"] for entry in logs] == ["copy_ended_late"]


async def test_a_load_that_ends_late_is_still_checked(rig: Rig) -> None:
    await stored(rig, [1], [1])
    rig.copier.hold()
    rig.pump.submit_loads([load(2, [1], [5])])
    with capture_logs():
        await rig.clock.advance(TIMEOUT_S * 1.5)
        rig.rot(1)
        rig.copier.release()
        rig.reader.release()
        found: dict[int, CopyOutcome] = {}
        for _ in range(4):  # abandoned copies are rarely queried
            rig.clock.jump(TIMEOUT_S)
            found |= rig.outcomes()
    assert found == {2: CORRUPT}


async def test_memory_is_kept_while_checksums_may_read_it(rig: Rig) -> None:
    await stored(rig, [1], [1])
    rig.pump.submit_loads([load(2, [1], [5])])
    closing = asyncio.create_task(rig.pump.close())
    with capture_logs() as logs:
        await wait_all_blocked()
        assert not closing.done()
        await rig.clock.advance(2 * TIMEOUT_S)
    assert closing.done()
    assert "host_memory_kept" in [entry["event"] for entry in logs]
    assert rig.arena.ready_slots > 0


async def test_loads_are_checked_without_the_coroutine() -> None:
    rig = Rig(verify="full")
    await rig.arena.prepare()
    rig.copier.release()
    with capture_logs():
        rig.pump.coroutine_lost("its thread is gone")
        rig.pump.submit_loads([load(1, [1], [5])])
        assert rig.outcomes() == {}
        rig.reader.run_all()
        assert rig.outcomes() == {1: CORRUPT}
    rig.assert_nothing_held()
