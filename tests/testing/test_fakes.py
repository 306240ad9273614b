from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvoffload.model.wire import Direction
from kvoffload.testing import FakeClock, FakeDevice, GatedCopier, GatedTicket, wait_all_blocked
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns


@pytest.mark.asyncio
async def test_sleepers_wake_in_order_and_each_sees_its_own_wake_up_time() -> None:
    clock, woken = FakeClock(5.0), list[tuple[str, float]]()

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await clock.sleep(nap)
            woken.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper("a", 2.0, 2.0)), asyncio.create_task(sleeper("b", 3.0))]
    await clock.advance(1.5)
    assert (woken, clock.sleepers) == ([], 2)
    await clock.advance(3.0)
    assert woken == [("a", 7.0), ("b", 8.0), ("a", 9.0)]
    assert clock.monotonic() == 9.5
    await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_a_cancelled_sleeper_is_not_woken() -> None:
    clock = FakeClock()
    task = asyncio.create_task(clock.sleep(1.0))
    await wait_all_blocked()
    task.cancel()
    await wait_all_blocked()
    assert clock.sleepers == 0
    await clock.advance(2.0)
    assert task.cancelled()


@pytest.mark.asyncio
async def test_a_sleep_of_0_returns_at_once_and_a_jump_wakes_no_sleeper() -> None:
    clock = FakeClock()
    await clock.sleep(0)
    task = asyncio.create_task(clock.sleep(1.0))
    await wait_all_blocked()
    clock.jump(5.0)
    await wait_all_blocked()
    assert not task.done()
    await clock.advance(0.0)
    assert (task.done(), clock.monotonic()) == (True, 5.0)


class Bench:
    def __init__(self) -> None:
        self.source = np.arange(1, 9, dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.copier = GatedCopier()

    def submit(self) -> GatedTicket:
        source, target, size = (
            np.array([number], np.int64) for number in (self.source.ctypes.data, self.target.ctypes.data, 8)
        )
        return self.copier.submit(Direction.LOAD, CopyRuns(source, target, size), ())


def test_the_test_chooses_how_a_batch_ends() -> None:
    bench = Bench()
    ends = [
        (GatedTicket.finish, TicketState.DONE, [1, 2, 3, 4, 5, 6, 7, 8]),
        (GatedTicket.fail, TicketState.FAILED, [0] * 8),
        (GatedTicket.tear, TicketState.FAILED, [1, 2, 3, 4, 0, 0, 0, 0]),
        (GatedTicket.corrupt, TicketState.DONE, [254, 2, 3, 4, 5, 6, 7, 8]),
    ]
    for end, state, held in ends:
        bench.target[:] = 0
        ticket = bench.submit()
        assert ticket.query() is TicketState.PENDING
        end(ticket)
        assert (ticket.query(), bench.target.tolist()) == (state, held)


def test_released_batches_end_at_once_until_they_are_held_again() -> None:
    bench = Bench()
    first = bench.submit()
    bench.copier.release()
    second = bench.submit()
    bench.copier.hold()
    third = bench.submit()
    assert [ticket.is_open for ticket in (first, second, third)] == [False, False, True]
    assert bench.copier.open_tickets == [third]
    assert not GatedCopier(held=False).open_tickets


def test_each_refusal_applies_once() -> None:
    bench = Bench()
    bench.copier.refuse_submit(OSError("a"))
    bench.copier.refuse_fence(OSError("b"))
    with pytest.raises(OSError, match="a"):
        bench.submit()
    with pytest.raises(OSError, match="b"):
        bench.copier.fence()
    assert bench.copier.fence() == 1
    ticket = bench.submit()
    ticket.query_error = OSError("c")
    with pytest.raises(OSError, match="c"):
        ticket.query()
    bench.copier.close()
    assert bench.copier.is_closed


def test_writing_a_fake_device_block_changes_only_that_block() -> None:
    device = FakeDevice(3, [4, 2], [0, 1])
    others = (device.read(0), device.read(2))
    device.write(1, b"abcdef")
    assert device.read(1) == b"abcdef"
    assert (device.read(0), device.read(2)) == others
    assert len(device.snapshot()) == 3 * (4 + 3)
