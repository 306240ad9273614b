"""What a disk and a remote tier have in common."""

from __future__ import annotations

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.causes import Deferral, MissCause, TierOutcome
from kvoffload.model.events import LookupDeferred
from kvoffload.model.ids import SlotId
from tests.core.disk_world import DiskWorld
from tests.core.lower_world import LOAD, OTHER, STORE, TEXT, LowerWorld
from tests.core.remote_world import RemoteWorld
from tests.core.world import CORRUPT, DONE, FAILED

CAUSES = {DiskWorld: MissCause.ON_DISK, RemoteWorld: MissCause.IN_REMOTE}

Kind = type[DiskWorld] | type[RemoteWorld]
on_each_tier = pytest.mark.parametrize("kind", CAUSES)


def states(world: LowerWorld, slots: tuple[SlotId, ...]) -> set[SlotState]:
    return {world.pool.state(slot) for slot in slots}


@pytest.mark.parametrize(
    ("kind", "min_hits", "found"),
    [
        (DiskWorld, 0, "xxxx xxxx xxxx"),
        (DiskWorld, 1, ".... xxx. xxx."),
        (DiskWorld, 2, ".... .... xxx."),
        (RemoteWorld, 1, ".... xxx. xxx."),
    ],
)
def test_a_block_found_min_hits_times_is_spilled_once(kind: Kind, min_hits: int, found: str) -> None:
    world = kind(min_hits=min_hits)
    for number, below in enumerate(found.split()):
        if number == 1:  # the second request hits on the host, the third on the device
            world.device.forget_keys()
        world.serve_again(f"time {number}", TEXT)
        assert world.below(TEXT) == below
    assert world.on_host(TEXT) == "xxxx"
    assert world.copied(STORE) == below.count("x")


@on_each_tier
def test_open_spills_pin_at_most_an_eighth_of_the_host(kind: Kind) -> None:
    world = kind(host=16)
    world.serve("once", TEXT)
    world.serve("again", TEXT, drains=False)
    for _ in range(2):
        world.idle_step()
    assert [len(world.copies[job].job.slots) for job in world.tier_jobs(STORE)] == [2]


@on_each_tier
def test_blocks_only_on_a_lower_tier_are_fetched_and_then_loaded(kind: Kind) -> None:
    world = kind.holding(TEXT, host=8, ranks=2)
    assert (world.on_host(TEXT), world.below(TEXT)) == ("....", "xxx.")
    request = world.add("late", TEXT)
    assert world.lookup(request) is None
    assert world.reported(LookupDeferred)[-1] == LookupDeferred(request.name, Deferral.FETCH)
    world.idle_step()
    assert world.lookup(request) is None
    world.finish()
    assert world.on_host(TEXT) == "xx.."  # a fetch may fill a quarter of the host
    assert world.admit(request) == 8
    assert world.miss() is CAUSES[kind]
    world.load_and_run(request)


@on_each_tier
def test_a_hit_shorter_than_the_tiers_break_even_is_computed(kind: Kind) -> None:
    world = kind.holding(TEXT, host=32)
    world.least_from[kind.TIER] = 13
    world.lookup(world.add("first", "unknown"))
    request = world.add("late", TEXT)
    assert world.admit(request) == 0
    assert world.miss() is CAUSES[kind]
    world.idle_step()
    assert world.tier_jobs(LOAD) == []
    world.least_from[kind.TIER] = 12
    assert world.lookup(world.add("next", TEXT)) is None


@on_each_tier
def test_r14_one_prefix_on_a_lower_tier_is_fetched_once(kind: Kind) -> None:
    world = kind.holding(TEXT, host=32)
    requests = [world.add(f"late{number}", TEXT) for number in range(4)]
    assert [world.lookup(each) for each in requests] == [None] * 4
    world.idle_step()
    assert [world.lookup(each) for each in requests] == [None] * 4
    assert len(world.tier_jobs(LOAD)) == 1
    world.finish()
    assert world.admit(requests[0]) == 12
    assert world.copied(LOAD) == 3


# -- ranks ------------------------------------------------------------------------------------------------------


@on_each_tier
def test_r4_a_block_is_on_a_lower_tier_when_every_rank_has_written_it(kind: Kind) -> None:
    world = kind(ranks=2)
    job = world.spilling()
    world.report(0, job)
    assert (world.below(TEXT), world.count(SlotState.PINNED)) == ("....", 3)
    world.report(1, job)
    assert (world.below(TEXT), world.count(SlotState.PINNED)) == ("xxx.", 0)


@on_each_tier
@pytest.mark.parametrize("outcomes", [(FAILED, DONE), (DONE, FAILED)])
def test_r4_one_rank_that_cannot_write_fails_the_spill(kind: Kind, outcomes: tuple) -> None:
    world = kind(ranks=2)
    job = world.spilling()
    world.report(0, job, outcomes[0])
    assert world.count(SlotState.PINNED) == 3  # the other rank still reads them
    world.report(1, job, outcomes[1])
    assert (world.below(TEXT), world.count(SlotState.PINNED)) == ("....", 0)
    assert world.copied(STORE, TierOutcome.FAILED) == 3
    assert world.lower.pool.room == world.lower.pool.capacity
    world.drain()


@on_each_tier
def test_r16_host_slots_of_a_spill_that_a_rank_never_reports_are_not_allocated_again(kind: Kind) -> None:
    world = kind(ranks=2)
    job = world.spilling()
    slots = world.copies[job].job.slots
    world.overdue(job)
    world.report(0, job)
    world.reset()
    assert states(world, slots) == {SlotState.DRAINING}
    world.report(1, job)
    assert states(world, slots) == {SlotState.EMPTY}


# -- failures and resets ----------------------------------------------------------------------------------------


@on_each_tier
def test_r17_a_failed_fetch_makes_its_request_wait_only_once(kind: Kind) -> None:
    world = kind.holding(TEXT, host=32)
    request, job = world.fetching()
    world.report(0, job, FAILED)
    assert world.admit(request) == 0
    assert world.tier_jobs(LOAD) == []
    assert world.lookup(world.add("other", TEXT)) is None
    world.finish()
    world.run(request)


@on_each_tier
def test_r17_a_failing_tier_gets_no_jobs_until_it_works_again(kind: Kind) -> None:
    world = kind.holding(TEXT, ranks=2, host=32)
    world.fails(1)
    request = world.add("late", TEXT)
    assert world.lookup(request) == 0
    world.serve("other", OTHER)
    world.serve("other again", OTHER, drains=False)
    world.idle_step()
    assert world.copies == {}
    world.fails(1, works=True)
    assert world.lookup(request) is None


@on_each_tier
def test_after_a_broken_invariant_no_lower_tier_is_used(kind: Kind) -> None:
    world = kind()
    job = world.spilling()
    world.degrade()
    world.report(0, job)
    assert world.below(TEXT) == "...."
    world.serve("late", TEXT)
    world.idle_step()
    assert world.copies == {}


@on_each_tier
def test_r10_nothing_on_a_lower_tier_is_found_after_a_reset(kind: Kind) -> None:
    world = kind.holding(TEXT, host=32)
    request, _ = world.fetching()
    world.reset()
    assert world.lookup(request) == 0
    world.finish()
    assert (world.on_host(TEXT), world.below(TEXT)) == ("....", "....")
    assert world.copied(LOAD) == 0
    assert world.admit(request) == 0
    world.run(request)


@on_each_tier
@pytest.mark.parametrize("corrupt", [(), (0, 1, 2)])
def test_r10_a_spill_during_a_reset_is_not_found_later(kind: Kind, corrupt: tuple[int, ...]) -> None:
    world = kind(ranks=2)
    job = world.spilling()
    slots = world.copies[job].job.slots
    world.reset()
    if isinstance(world, RemoteWorld):
        world.reach()
    for rank in (0, 1):
        assert states(world, slots) == {SlotState.DRAINING}
        world.report(rank, job, CORRUPT if corrupt else DONE, corrupt)
    assert states(world, slots) == {SlotState.EMPTY}
    assert world.below(TEXT) == "...."
    assert world.lower.pool.room == world.lower.pool.capacity
