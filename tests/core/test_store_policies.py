"""The store policies `twice` and `auto`: what a full host gets, and how one planner replaces another."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.planners import EagerPlanner, LazyPlanner, TwicePlanner
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.events import StorePolicyMoved
from kvoffload.model.facts import Limits
from tests.core.disk_world import DiskWorld
from tests.core.world import TEXT, World, full, recurrent

OTHERS = [f"{number}bcdefghijklm" for number in range(10)]


def twice(host: int, **options: Any) -> World:  # noqa: ANN401  # those of `World`
    return World(policy="twice", host=host, **{"device": 40, **options})


def test_twice_stores_everything_while_the_host_has_empty_slots() -> None:
    world = twice(host=6)
    for text in OTHERS[:2]:
        world.serve(text, text)
    assert [world.on_host(text) for text in OTHERS[:2]] == ["xxx", "xxx"]


def test_twice_stores_a_block_on_a_full_host_only_when_it_is_offered_again() -> None:
    world = twice(host=6)
    for text in (*OTHERS[:2], TEXT):
        world.serve(text, text)
    assert world.on_host(TEXT) == "..."
    assert world.stores()[StoreOutcome.SEEN_ONCE] == 3
    world.device.forget_keys()
    request = world.add("again", TEXT)
    assert world.admit(request) == 0
    assert world.miss() is MissCause.SEEN_ONCE
    world.load_and_run(request)
    world.end_and_drain(request)
    assert world.on_host(TEXT) == "xxx"


def test_blocks_that_the_host_has_take_no_empty_slot_from_the_others_of_a_step() -> None:
    world = twice(host=6)
    world.serve("a", TEXT)
    fresh = world.admitted("fresh", OTHERS[0])
    world.step(fresh)
    hit = world.admitted("hit", TEXT)
    world.step(hit, fresh)
    for request in (hit, fresh):
        world.end_and_drain(request)
    assert world.on_host(OTHERS[0]) == "xxx"


def test_twice_fills_the_last_empty_slots_with_the_head_of_a_prompt() -> None:
    world = twice(host=5)
    world.serve("a", TEXT)
    world.serve("b", OTHERS[0])
    assert world.on_host(OTHERS[0]) == "xx."


def test_a_block_that_only_the_device_has_counts_as_offered_again() -> None:
    world = twice(host=3)
    for number, text in enumerate((OTHERS[0], TEXT, TEXT)):
        world.serve(f"r{number}", text)
    assert world.on_host(TEXT) == "xxx"


def test_twice_forgets_what_was_offered_long_ago() -> None:
    world = twice(host=3, device=64)
    for text in (OTHERS[0], TEXT, *OTHERS[1:5]):  # 12 blocks after TEXT; the host has 3 slots
        world.serve(text, text)
    world.serve("again", TEXT)
    assert world.on_host(TEXT) == "..."


@pytest.mark.parametrize("policy", ["eager", "twice", "lazy"])
def test_auto_begins_eagerly_and_moves_to_what_is_chosen(policy: str) -> None:
    world = World(policy="auto", device=40)
    assert type(world.core._planner) is EagerPlanner
    world.choose(policy)
    kinds = {"eager": EagerPlanner, "twice": TwicePlanner, "lazy": LazyPlanner}
    assert type(world.core._planner) is kinds[policy]
    assert world.core.store_policy == policy
    moves = [(event.was, event.policy) for event in world.reported(StorePolicyMoved)]
    assert moves == ([] if policy == "eager" else [("eager", policy)])


def test_a_policy_that_begins_while_requests_run_offers_their_blocks() -> None:
    world = World(policy="auto", device=40)
    world.choose("lazy")
    request = world.computed()
    assert world.offered() == 0
    world.choose("eager")
    world.idle_step()
    world.drain()
    assert world.on_host(TEXT) == "xxx"
    world.end_and_drain(request)


def test_a_load_that_ends_after_a_move_is_offered_by_the_new_planner() -> None:
    world = World(policy="auto", device=40, host=3)
    world.serve("a", TEXT[:9])
    world.device.forget_keys()
    request = world.loading("b", TEXT)
    world.choose("twice")
    world.load_and_run(request)
    world.end_and_drain(request)
    assert world.on_host(TEXT) == "xxx"


def test_auto_does_not_become_lazy_after_a_request_with_a_limit_on_stores() -> None:
    world = World(policy="auto", device=40)
    assert "lazy" in world.core.policies
    world.serve_limited("private", TEXT, Limits(store_tokens=4))
    assert "lazy" not in world.core.policies
    world.choose("lazy")
    assert world.core.store_policy == "eager"


def test_auto_stays_eager_where_others_find_the_blocks_or_a_hit_needs_states() -> None:
    for world in (
        World(policy="auto", device=40, keeps=True),
        DiskWorld(policy="auto", device=40, disk=8),
        World(full(), recurrent(group=1), policy="auto", device=40),
    ):
        assert world.core.policies == ("eager",)
        world.choose("twice")
        assert world.core.store_policy == "eager"


def test_auto_does_not_become_lazy_on_a_small_device() -> None:
    assert World(policy="auto", device=12, step_tokens=8).core.policies == ("eager", "twice")
