"""Recurrent groups: their states are stored when the engine hands them over, and a hit ends where there is one."""

from __future__ import annotations

from kvoffload.model import facts
from kvoffload.model.causes import StoreOutcome
from kvoffload.model.engine import Promises
from tests.core.world import Req, World, full, key_at, recurrent

TEXT = "abcdefghijklm"


def hand_over(world: World, request: Req, *ends: int) -> None:
    """The engine holds the states after these tokens until they are stored."""
    states = tuple((key_at(TEXT, end, 1), request.tables[1][end // 4 - 1]) for end in ends)
    world.tell(facts.StatesHandedOff(states))


def world_with_states(*ends: int) -> World:
    world = World(full(), recurrent(group=1), promises=Promises(hands_off_states=True))
    request = world.add("first", TEXT)
    world.admit(request)
    while request.computed < len(TEXT):
        at = request.computed + 4
        world.step(tokens=4)
        if at in ends:
            hand_over(world, request, at)
    world.step(tokens=1)
    world.drain()
    world.end(request)
    world.device.forget_keys()
    return world


def test_nothing_of_a_recurrent_group_is_offered_by_itself() -> None:
    world = world_with_states()
    assert world.on_host(TEXT) == "xxx"
    assert world.on_host(TEXT, group=1) == "..."
    assert world.admit(world.add("a", TEXT)) == 0


def test_a_hit_ends_at_the_last_state() -> None:
    world = world_with_states(4, 8)
    assert world.on_host(TEXT, group=1) == "xx."
    request = world.add("a", TEXT)
    assert world.admit(request) == 8
    world.step()
    world.finish()
    world.run(request)  # the world compares what it computes from
    assert world.results == [("a", True)]


def test_a_state_that_cannot_be_stored_now_is_declined_for_good() -> None:
    world = World(full(), recurrent(group=1), host=0)
    request = world.add("a", TEXT)
    world.admit(request)
    world.step(tokens=4)
    hand_over(world, request, 4)
    assert world.stores() == {StoreOutcome.HOST_FULL: 1}
    assert not world.core.has_work


def test_a_state_that_the_host_has_already_counts_as_used() -> None:
    world = World(full(), recurrent(group=1), host=8, promises=Promises(hands_off_states=True))
    request = world.add("a", TEXT)
    world.admit(request)
    for end in (4, 8):
        world.step(tokens=4)
        hand_over(world, request, end)
        world.drain()
    hand_over(world, request, 4)
    assert world.stores()[StoreOutcome.ALREADY_CACHED] == 1
    order = [world.core.state.pool.key(slot) for slot in world.core.state.pool._order]
    states = [key_at(TEXT, 4, 1), key_at(TEXT, 8, 1)]
    assert [key for key in order if key in states] == states[::-1]
