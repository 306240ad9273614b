from __future__ import annotations

import pytest

from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.facts import TransferReported
from kvoffload.model.wire import Direction, TransferReport
from tests.core.world import TEXT, World, full, window


def test_offers_of_a_request_that_ends_before_memory_is_ready_have_their_own_outcome() -> None:
    world = World(host=0, is_growing=True)
    world.end(world.computed("goes"))
    assert world.stores() == {StoreOutcome.NOT_READY: 3}
    assert world.next_miss() is MissCause.DECLINED_NOT_READY
    assert not world.core.has_work


def test_as_memory_grows_waiting_offers_are_stored_heads_first() -> None:
    world = World(full(), window(64, group=1), ranks=2, host=0, is_growing=True)
    world.computed("runs")
    assert (world.offered(), world.stores(), world.open_jobs()) == (6, {}, [])
    for slots, found in ((2, "x.."), (4, "xx.")):
        world.ready_up_to(slots, is_growing=True)
        world.copy_all()
        assert (world.on_host(TEXT), world.on_host(TEXT, group=1)) == (found, found)
    assert set(world.stores()) == {StoreOutcome.STORED}
    world.ready_up_to(64)
    world.copy_all()
    assert world.stores() == {StoreOutcome.STORED: 6}


def test_a_host_that_will_not_grow_is_full() -> None:
    world = World(host=0, is_growing=True)
    request = world.computed("runs")
    world.ready_up_to(0)
    world.idle_step()
    world.end(request)
    world.end(world.computed("later", "0123456789"))
    assert world.stores() == {StoreOutcome.HOST_FULL: 5}


def test_r4_memory_grows_until_the_last_rank_has_it_ready() -> None:
    world = World(ranks=2, host=0, is_growing=True)
    world.computed("runs")
    reports = (0, 9, False, 0), (1, 2, True, 2), (1, 1, True, 2), (1, 9, False, 3)
    for rank, slots, is_growing, stored in reports:
        world.tell(TransferReported(TransferReport(world.ranks[rank], (), slots, is_growing=is_growing)))
        world.ready = slots
        world.idle_step()
        assert sum(len(world.copies[job].job.slots) for job in world.open_jobs(Direction.STORE)) == stored


@pytest.mark.parametrize("is_ready", [False, True])
def test_lazy_offers_again_once_memory_is_ready(is_ready: bool) -> None:
    world = World(host=0, device=16, step_tokens=4, policy="lazy", is_growing=True)
    for number in range(4):
        world.end(world.computed(f"r{number}", f"{number} is a prompt"))
    refused = world.stores()[StoreOutcome.NOT_READY]
    assert set(world.stores()) == {StoreOutcome.NOT_READY}
    if is_ready:
        world.ready_up_to(64)
    for _ in range(3):
        world.copy_all()
    assert world.stores()[StoreOutcome.NOT_READY] == refused
    assert (StoreOutcome.STORED in world.stores()) is is_ready
