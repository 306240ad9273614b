"""What a store and a load cost the engine's thread, counted in calls and in wakes, which are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvoffload.model.ids import Rank
from kvoffload.model.wire import Direction
from kvoffload.testing import FakeClock, FakeDevice, GatedCopier
from kvoffload.transfer.pump import TransferPump
from tests.copy_jobs import device_job
from tests.operations import calls
from tests.transfer.rig import TIMEOUT_S, Rig, load, ready_arena, running, store

_STORES = 20
_COPY_S = 0.001


def test_starting_a_load_makes_as_many_calls_for_64_blocks_as_for_8() -> None:
    arena = ready_arena(FakeDevice(128, [64, 32]), 128)
    pump = TransferPump(
        Rank(0), arena, GatedCopier(), FakeClock(), store_bytes_in_flight=96, timeout_s=TIMEOUT_S
    )
    pump.submit_loads([load(1, [1], [1])])  # the first load prepares the addresses of all regions
    jobs = [load(2, range(8), range(8)), load(3, range(64), range(64))]
    counts = [calls(partial(pump.submit_loads, [job])) for job in jobs]
    assert counts == [counts[0]] * 2
    assert counts[0] <= 62


@pytest.mark.parametrize(("step_s", "most_turns", "most_wakes"), [(0.01, 2.0, 1.0), (0.002, 0.5, 0.5)])
@pytest.mark.asyncio
async def test_a_store_in_each_step_wakes_the_coroutine_at_most_twice_and_less_often_in_short_steps(
    step_s: float, most_turns: float, most_wakes: float
) -> None:
    rig, wakes = Rig(slots=_STORES), list[bool]()
    async with running(rig):
        rig.pump._sleeper.wake = counted(rig.pump._sleeper.wake, wakes)  # type: ignore[method-assign]
        before = rig.pump.turns
        for number in range(_STORES):
            rig.pump.submit_stores([store(number, [number], [number % 8])])
            await rig.clock.advance(_COPY_S)
            for ticket in rig.copier.open_tickets:
                ticket.finish()
            await rig.clock.advance(step_s - _COPY_S)
            rig.pump.poll()
        assert (rig.pump.turns - before) / _STORES <= most_turns
        assert len(wakes) / _STORES <= most_wakes


def counted(wake: Callable[[], bool], wakes: list[bool]) -> Callable[[], bool]:
    def count() -> bool:
        wakes.append(wake())
        return wakes[-1]

    return count


@pytest.mark.parametrize(
    ("what", "direction", "blocks", "in_parts", "verify", "polls"),
    [
        ("nothing waits for the end of a store", Direction.STORE, 1, False, "off", 0),
        ("a request waits for a load", Direction.LOAD, 1, False, "off", 1),
        ("queries start the rest of a store", Direction.STORE, 1, True, "off", 2),
        ("the store's checksums are not computed", Direction.STORE, 1, False, "full", 2),
        ("more stores wait for the limit", Direction.STORE, 8, False, "off", 2),
    ],
)
@pytest.mark.asyncio
async def test_polls_are_rare_only_if_nothing_waits_for_the_end_of_a_copy(
    what: str, direction: Direction, blocks: int, in_parts: bool, verify: str, polls: int
) -> None:
    rig = Rig(verify=verify)
    rig.copier.in_parts = in_parts
    job = device_job(1, direction, range(blocks), range(blocks))
    async with running(rig):
        (rig.pump.submit_loads if direction is Direction.LOAD else rig.pump.submit_stores)([job])
        await rig.clock.advance(0)
        first = rig.pump.turns
        await rig.clock.advance(0.001)
        assert rig.pump.turns - first == polls, what


@pytest.mark.asyncio
async def test_a_store_that_ended_before_a_load_began_does_not_lower_the_limit(rig: Rig) -> None:
    rig.pump.submit_stores([store(1, [1], [1])])
    await rig.clock.advance(0.001)
    rig.copier.tickets[0].finish()
    rig.pump.submit_loads([load(2, [2], [2])])
    await rig.clock.advance(0.1)
    assert rig.counts.store_bytes_bound == 4 * 96
    rig.pump.submit_stores([store(3, [3], [3])])
    await rig.clock.advance(0.1)
    rig.copier.tickets[2].finish()
    await rig.clock.advance(0.1)
    assert rig.counts.store_bytes_bound == 2 * 96  # this store ended while the load was pending
