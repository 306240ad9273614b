"""What leaves the host early when a client says that a session has ended."""

from __future__ import annotations

import pytest

from kvoffload.model.events import SessionEnded
from kvoffload.model.ids import RequestId
from tests.core.world import World, full, key_at

SHARED = "abcd"
FIRST = SHARED + "efghi"
LAST = FIRST + "jklm"
OTHER = SHARED + "opqrs"
OWN = [key_at(LAST, end) for end in (12, 8)]  # deepest first


def order(world: World) -> list[object]:
    pool = world.core.state.pool
    return [pool.key(slot) for slot in pool.order]


def served(*, is_last: bool, session: int = 1) -> World:
    """Return a world in which two sessions share their first block, and one of them has had a second turn."""
    world = World(full())
    world.serve_turn(FIRST, session)
    world.serve_turn(OTHER, 2)
    world.serve_turn(LAST, session, is_last=is_last)
    return world


def test_r15_blocks_that_only_an_ended_session_used_leave_first_and_deepest_first() -> None:
    world = served(is_last=True)
    assert order(world) == [*OWN, key_at(OTHER, 8), key_at(SHARED, 4)]
    assert world.reported(SessionEnded) == [SessionEnded(RequestId("turn"), 2)]


@pytest.mark.parametrize("session", [1, 0])
def test_a_session_that_has_not_ended_leaves_in_the_order_of_use(session: int) -> None:
    world = served(is_last=False, session=session)
    assert order(world) == [key_at(OTHER, 8), *OWN, key_at(SHARED, 4)]
    assert not world.reported(SessionEnded)


def test_the_end_of_another_session_lets_only_what_its_own_request_stored_leave_first() -> None:
    world = World(full())
    world.serve_turn(FIRST, 1)
    world.serve_turn(OTHER, 2)
    world.serve_turn(LAST, 3, is_last=True)
    assert order(world) == [OWN[0], key_at(OTHER, 8), OWN[1], key_at(SHARED, 4)]


def test_a_last_turn_of_no_session_ends_nothing() -> None:
    world = served(is_last=True, session=0)
    assert order(world) == [key_at(OTHER, 8), *OWN, key_at(SHARED, 4)]


@pytest.mark.parametrize("session", [2, 0])
def test_a_block_that_another_client_used_does_not_leave_early(session: int) -> None:
    world = World(full())
    world.serve_turn(LAST, 1)
    world.serve_turn(FIRST, session)
    world.serve_turn(LAST, 1, is_last=True)
    assert order(world) == [OWN[0], OWN[1], key_at(SHARED, 4)]
    assert world.reported(SessionEnded) == [SessionEnded(RequestId("turn"), 1)]


def test_a_block_that_another_request_still_uses_does_not_leave_early() -> None:
    world = World(full())
    world.serve_turn(FIRST, 1)
    running = world.add("running", FIRST, session=1)
    world.device.forget_keys()
    world.admit(running)
    world.load_and_run(running)
    world.serve_turn(LAST, 1, is_last=True)
    world.serve_turn(OTHER, 2)
    assert order(world)[0] == OWN[0]
    assert OWN[1] not in order(world)
    world.end_and_drain(running)
    assert order(world).index(key_at(OTHER, 8)) < order(world).index(OWN[1])


def test_a_block_of_an_ended_session_that_returns_counts_as_used_again() -> None:
    world = served(is_last=True)
    world.serve_turn(LAST)
    assert order(world) == [key_at(OTHER, 8), *OWN, key_at(SHARED, 4)]


def test_a_preempted_last_turn_has_not_ended_its_session() -> None:
    world = World(full())
    request = world.add("a", LAST, session=1, is_last_turn=True)
    world.admit(request)
    world.load_and_run(request)
    world.preempt_and_step(request)
    world.drain()
    assert OWN[0] in order(world)  # not held any more
    assert not world.reported(SessionEnded)


def test_a_slots_next_block_belongs_to_no_session() -> None:
    world = World(full(), host=3)
    world.serve_turn(LAST, 1)
    assert all(world.core.state.pool.sessions)
    request = world.add("other", "0123456789abc")
    world.admit(request)
    world.load_and_run(request)
    assert not any(world.core.state.pool.sessions)
