"""What a request's own limits exclude: loads beyond the device's hit, stores beyond the first tokens, lower tiers."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.planners import LazyPlanner
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.facts import Limits
from kvoffload.model.groups import GroupSpec
from kvoffload.model.wire import Tier
from tests.core.disk_world import DiskWorld
from tests.core.lower_world import LOAD
from tests.core.remote_world import RemoteWorld
from tests.core.world import TEXT, World, cached, full, recurrent, window

Kind = type[DiskWorld] | type[RemoteWorld]


@pytest.mark.parametrize(
    ("groups", "allowed", "found"),
    [
        ((full(),), 0, 0),
        ((full(),), 3, 0),
        ((full(),), 4, 4),
        ((full(),), 11, 8),
        ((full(),), 100, 12),
        ((full(), window(5, group=1)), 8, 4),  # of the limit, one token is not used
        ((full(), window(5, group=1)), 9, 8),
        ((full(2), full(4, group=1)), 7, 4),  # whole blocks of every group
        ((full(), recurrent(group=1)), 9, 8),  # the load ends at a state
    ],
)
def test_a_load_has_at_most_the_tokens_that_its_request_allows(
    groups: tuple[GroupSpec, ...], allowed: int, found: int
) -> None:
    world = cached(*groups)
    request = world.add("a", TEXT, limits=Limits(load_tokens=allowed))
    assert world.admit(request) == found
    if found < 12:
        assert world.miss() is MissCause.LIMITED
    world.load_and_run(request)


def test_the_limit_counts_from_the_devices_own_hit_at_each_lookup() -> None:
    world = cached()
    request = world.add("a", TEXT, limits=Limits(load_tokens=4))
    assert world.lookup(request) == 4
    world.serve("shorter", TEXT[:9])
    assert world.device_hit(request) == 8
    assert world.admit(request) == 4
    world.load_and_run(request)
    world.preempt_and_step(request)
    world.device.forget_keys()
    assert world.lookup(request) == 4


def test_a_missing_block_before_the_limit_keeps_its_own_cause() -> None:
    world = cached(text=TEXT[:5])
    assert world.admit(world.add("a", TEXT, limits=Limits(load_tokens=8))) == 4
    assert world.miss() is MissCause.NEVER_SEEN


@pytest.mark.parametrize(
    ("allowed", "stored"), [(0, "..."), (3, "..."), (4, "x.."), (11, "xx."), (100, "xxx")]
)
@pytest.mark.parametrize("is_preempted", [False, True])
def test_only_the_first_tokens_that_a_request_allows_are_stored(
    allowed: int, stored: str, is_preempted: bool
) -> None:
    world = World()
    request = world.add("a", TEXT, limits=Limits(store_tokens=allowed))
    world.admit(request)
    world.load_and_run(request)
    if is_preempted:
        world.copy_all()
        world.preempt_and_step(request)
        world.device.forget_keys()
        world.admit(request)
        world.load_and_run(request)
    world.end_and_drain(request)
    assert world.on_host(TEXT) == stored
    if allowed < 12:
        assert world.stores()[StoreOutcome.LIMITED] >= stored.count(".")
        assert world.next_miss() is MissCause.LIMITED


@pytest.mark.parametrize("groups", [(full(),), (full(), recurrent(group=1))])
def test_what_an_adapter_excludes_counts_with_the_adapters_reason(groups: tuple[GroupSpec, ...]) -> None:
    world = World(*groups)
    nothing = Limits(load_tokens=0, store_tokens=0, counts_as=StoreOutcome.UNSAFE_HASHES)
    world.serve_limited("a", TEXT, nothing)
    assert world.miss() is MissCause.UNSAFE_HASHES
    assert {*world.stores()} == {StoreOutcome.UNSAFE_HASHES}
    assert world.next_miss() is MissCause.UNSAFE_HASHES


def test_another_requests_limit_does_not_keep_a_block_off_the_host() -> None:
    world = World()
    world.serve_limited("private", TEXT, Limits(store_tokens=0))
    world.serve("shared", TEXT)
    assert world.on_host(TEXT) == "xxx"


def test_a_handed_off_state_beyond_the_limit_is_not_stored() -> None:
    world = World(full(), recurrent(group=1))
    world.serve_limited("a", TEXT, Limits(store_tokens=4))
    assert world.on_host(TEXT) == "x.."
    assert [state for state in world.on_host(TEXT, group=1) if state == "x"] in ([], ["x"])
    assert StoreOutcome.LIMITED in world.stores()


@pytest.mark.parametrize("groups", [(full(),), (full(), window(5, group=1))])
def test_lazy_stores_leave_out_what_its_request_excluded_even_long_after_its_end(
    groups: tuple[GroupSpec, ...],
) -> None:
    world = World(*groups, policy="lazy", device=64, host=64)
    assert isinstance(world.core._planner, LazyPlanner)
    world.serve_limited("private", TEXT, Limits(store_tokens=4))
    for number in range(30):
        world.serve(f"r{number}", f"{number:02}cdefghijklm")
    assert world.on_host(TEXT)[1:] == ".."
    assert any(world.on_host(f"{number:02}cdefghijklm") == "xxx" for number in range(30))


def test_lazy_stores_a_block_for_a_later_request_without_a_limit() -> None:
    world = World(policy="lazy", device=40, host=64)
    world.serve_limited("private", TEXT, Limits(store_tokens=0))
    world.serve("shared", TEXT)
    for number in range(20):
        world.serve(f"r{number}", f"{number:02}cdefghijklm")
    assert world.on_host(TEXT) == "xxx"


@pytest.mark.parametrize("kind", [DiskWorld, RemoteWorld])
@pytest.mark.parametrize("limits", [Limits(tiers=()), Limits(load_tokens=0)])
def test_nothing_is_fetched_for_a_request_that_excludes_it(kind: Kind, limits: Limits) -> None:
    world = kind.holding(TEXT, host=32)
    request = world.add("a", TEXT, limits=limits)
    world.idle_step()
    assert world.admit(request) == 0
    assert not world.tier_jobs(LOAD)
    assert world.miss() is MissCause.LIMITED
    world.serve("other", TEXT)
    assert world.on_host(TEXT)[:3] == "xxx"


@pytest.mark.parametrize(
    ("kind", "allowed", "found"),
    [
        (DiskWorld, (Tier.DISK,), 12),
        (DiskWorld, (Tier.REMOTE,), 0),
        (RemoteWorld, (Tier.REMOTE,), 12),
        (RemoteWorld, (Tier.DISK,), 0),
    ],
)
def test_blocks_are_fetched_from_the_tiers_that_a_request_allows(
    kind: Kind, allowed: tuple[Tier, ...], found: int
) -> None:
    world = kind.holding(TEXT, host=64)
    request = world.add("a", TEXT, limits=Limits(tiers=allowed))
    world.lookup(request)
    world.idle_step()
    world.finish()
    assert world.admit(request) == found
    world.load_and_run(request)


def test_a_fetch_is_as_long_as_the_load_may_be() -> None:
    world = DiskWorld.holding(TEXT, host=64)
    request = world.add("a", TEXT, limits=Limits(load_tokens=8))
    assert world.lookup(request) is None
    world.idle_step()
    world.finish()
    assert world.on_host(TEXT).count("x") == 2
    assert world.admit(request) == 8
    assert world.miss() is MissCause.LIMITED


def test_blocks_on_the_host_are_found_whatever_tiers_a_request_allows() -> None:
    world: Any = cached()
    assert world.admit(world.add("a", TEXT, limits=Limits(tiers=()))) == 12
