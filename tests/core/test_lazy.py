from __future__ import annotations

import pytest

from kvoffload.core.planners import EagerPlanner, LazyPlanner
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.groups import GroupSpec
from tests.core.disk_world import DiskWorld
from tests.core.world import TEXT, World, full, keys_of


def lazy(*groups: GroupSpec, **options: object) -> World:
    return World(*groups, policy="lazy", **options)  # type: ignore[arg-type]


def test_lazy_stores_nothing_while_the_device_has_free_blocks() -> None:
    world = lazy(device=64)
    world.end_and_drain(world.computed())
    assert world.offered() == 0


def test_the_next_blocks_are_stored_before_they_are_reallocated() -> None:
    world = lazy(device=40)
    texts = [f"{number}bcdefghijklm" for number in range(20)]
    for number, text in enumerate(texts):
        world.serve(f"r{number}", text)
    on_device = set(world.device.index)
    for text in texts:  # the host must have every block that the device has lost
        for key in keys_of(text, world.groups[0]):
            assert key in on_device or key in world.pool.index
    assert any(world.on_host(text) == "xxx" for text in texts)


def test_a_small_device_uses_the_eager_planner() -> None:
    # One step may allocate 3 of the 11 usable blocks, which is too large a share for the lazy planner.
    assert isinstance(lazy(device=12, step_tokens=8).core._planner, EagerPlanner)
    assert isinstance(lazy(device=13, step_tokens=8).core._planner, LazyPlanner)


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 5, 8, 20, 39, 60])
def test_the_lookahead_stores_no_block_again_and_again(slots: int, is_running: bool) -> None:
    # Regression: stored blocks move to the end of the device's free queue. With a host smaller than this
    # queue, the planner stored blocks forever, because each store evicted other blocks.
    world = lazy(device=40, host=slots)
    for number in range(20):
        world.serve(f"r{number}", f"{number}bcdefghijklm")
    if is_running:
        world.admitted("runs", "short")
        world.step()
    for _ in range(100):
        world.copy_all()
    assert not world.core.has_work
    before = world.stores(), world.evicted()
    for _ in range(10):
        world.copy_all()
    assert (world.stores(), world.evicted()) == before


def test_at_its_end_a_request_stores_blocks_that_the_next_steps_may_evict() -> None:
    world = lazy(device=16)
    request = world.computed(text="0123456789" * 5)
    assert world.device.free_blocks() == 3  # two steps may allocate 6 blocks, and 3 are free
    assert world.offered() == 0
    world.end(request)
    assert world.offered() == 3
    world.drain()
    assert world.on_host("0123456789" * 5)[-3:] == "xxx"


def test_blocks_without_a_lease_at_the_end_of_their_request_are_reported_as_such() -> None:
    world = lazy(device=24, step_tokens=16)
    requests = [world.computed(f"r{number}", f"{number}bcdefghijklmnopqrs") for number in range(4)]
    for request in requests:
        world.end(request)
    assert world.core.stores.leased_blocks == world.shape.lease_limit
    assert world.stores() == {StoreOutcome.LEASE_LIMIT: 6}


def test_blocks_lost_to_preemption_are_counted() -> None:
    world = lazy(device=32)
    victim = world.computed(text="0123456789")
    blocks = victim.tables[0][:2]
    world.preempt(victim)
    for block in blocks:
        world.device.free.move_to_end(block, last=False)
    hungry = world.add("hungry", "x" * 8)
    world.admit(hungry)  # The admission in the same step allocates the blocks that were just freed.
    world.step(hungry)
    assert world.stores() == {StoreOutcome.LOST: 2}
    world.admit(victim)
    assert world.miss() is MissCause.LOST


def test_the_lookahead_stops_at_the_lease_limit_and_continues_in_the_next_step() -> None:
    # stores may lease 6 blocks at once, but the planner looks at 20 blocks of the free queue
    world = lazy(full(), device=24, step_tokens=16)
    assert world.shape.lease_limit == 6
    for number in range(5):
        world.end(world.computed(f"r{number}", f"{number}bcdefghijklmnop"))
    first = world.core.stores.leased_blocks
    assert first <= 6
    world.finish()
    world.idle_step()
    assert world.core.stores.leased_blocks > 0
    world.drain()


def test_the_lookahead_skips_blocks_from_before_a_reset() -> None:
    world = lazy(device=24)
    for number in range(6):
        world.serve(f"r{number}", f"{number}bcdefghijklm")
    world.reset()
    offered = world.offered()
    for _ in range(5):
        world.idle_step()
    assert world.offered() == offered
    world.serve("new", "0123456789")
    for number in range(6):
        world.serve(f"s{number}", f"{number}nopqrstuvwxyz")
    assert world.on_host("0123456789") == "xx"


def test_a_loads_blocks_count_as_allocated_before_it_ends() -> None:
    # Regression: blocks allocated for a load were counted too late, so the queue's new front was not checked.
    world = lazy(device=24)
    for number in range(12):
        world.serve(f"r{number}", f"{number:02}cdefghijklm")
    planner = world.core._planner
    assert isinstance(planner, LazyPlanner)
    clean = planner._clean
    loads = world.add("loads", "00cdefghijklm")
    assert world.admit(loads) == 12
    assert planner._clean == clean - 3
    world.step_and_copy()
    assert loads.state == "running"
    world.end_and_drain(loads)


def test_lazy_stores_nothing_after_a_broken_invariant() -> None:
    world = lazy(device=16)
    request = world.computed(text="0123456789" * 5)
    world.degrade()
    world.end(request)
    for _ in range(3):
        world.idle_step()
    assert set(world.stores()) == {StoreOutcome.DEGRADED}


def test_another_block_with_a_key_that_is_being_stored_is_not_offered() -> None:
    world = lazy(device=24)
    one, two = world.admitted("one", TEXT), world.admitted("two", TEXT)
    for _ in range(3):
        world.step(one, two)
    world.end(one)
    world.end(two)
    hungry = world.admitted("hungry", "0123456789" * 5)
    for _ in range(14):
        world.step(hungry, tokens=4)
    assert len(world.open_jobs()) == 1
    assert world.offered() == 4
    world.drain()
    assert world.on_host(TEXT) == "xxx"


@pytest.mark.parametrize("some_private", [False, True])
def test_r18_of_a_lazily_stored_block_it_is_not_known_whose_it_is(some_private: bool) -> None:
    """Once some request's blocks must not outlive the process, none is found later that no request offers."""
    world = DiskWorld(policy="lazy", device=40, host=64, disk=64, min_hits=0, keeps=True)
    texts = [f"{number}bcdefghijklm" for number in range(20)]
    for number, text in enumerate(texts):
        world.persists = not some_private or number > 0
        world.serve_again(f"r{number}", text)
    stored = [key for text in texts for key in keys_of(text, world.groups[0]) if key in world.pool.index]
    assert stored
    found = [key for key in stored if key in world.table.values() or key in world.disk.pool.index]
    assert len(found) == (0 if some_private else len(stored))
