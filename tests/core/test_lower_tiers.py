"""What a disk and a remote tier have in common."""

from __future__ import annotations

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.causes import Deferral, TierOutcome
from kvoffload.model.events import LookupDeferred, PrefixExceedsHost
from kvoffload.model.ids import SlotId
from tests.core.disk_world import DiskWorld
from tests.core.each_tier import CAUSES, LONG, Kind, next_engine, on_each_tier, rounds, wait_for_rounds
from tests.core.lower_world import LOAD, OTHER, STORE, TEXT, LowerWorld
from tests.core.remote_world import RemoteWorld
from tests.core.world import CORRUPT, DONE, FAILED, keys_of


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


def test_a_block_that_the_host_evicts_keeps_its_number_of_hits() -> None:
    world = DiskWorld(min_hits=2, host=8)
    for name in ("first", "second"):
        world.serve_again(f"{name} store", TEXT)
        assert world.below(TEXT) == "...."
        world.device.forget_keys()
        world.serve_again(f"{name} hit", TEXT)
        world.empty_host()
        assert world.on_host(TEXT) == "...."
    assert world.below(TEXT) == "xxx."


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
    world = kind.holding(TEXT, host=16, ranks=2)
    assert (world.on_host(TEXT), world.below(TEXT)) == ("....", "xxx.")
    request = world.add("late", TEXT)
    assert world.lookup(request) is None
    assert world.reported(LookupDeferred)[-1] == LookupDeferred(request.name, Deferral.FETCH)
    world.idle_step()
    assert world.lookup(request) is None
    world.finish()
    assert world.on_host(TEXT) == "xxx."
    assert world.admit(request) == 12
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
    world.lookup(world.add("second", "another"))
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


# -- prefixes that need several rounds of fetches -----------------------------------------------------------------


@on_each_tier
def test_a_prefix_that_fills_the_host_is_fetched_in_rounds_and_each_block_is_read_once(kind: Kind) -> None:
    world = next_engine(kind, LONG[:65], host=16)
    request = wait_for_rounds(world, world.add("late", LONG[:65]))
    assert request.brought == (0, 64)
    assert rounds(world) == [4, 2, 2, 2, 2, 2, 2]
    assert world.copied(LOAD) == 16
    world.load_and_run(request)
    world.end_and_drain(request)
    assert world.reported(PrefixExceedsHost) == []


@on_each_tier
@pytest.mark.parametrize("is_fetching", [True, False])
def test_stores_between_rounds_evict_no_fetched_block(kind: Kind, is_fetching: bool) -> None:
    world = next_engine(kind, LONG[:49], host=16)
    runs = world.admitted("runs", OTHER + OTHER)
    request = world.add("late", LONG[:49])
    while world.copied(LOAD) < (10 if is_fetching else 12):
        assert world.lookup(request) is None
        world.copy_all()
    if is_fetching:
        assert world.lookup(request) is None
    world.run(runs)
    world.finish()
    assert (world.on_host(LONG[:49]), world.on_host(runs.text)) == ("x" * 12, "xxxx....")
    wait_for_rounds(world, request)
    assert request.brought == (0, 48)
    assert world.copied(LOAD) == 12


@on_each_tier
def test_rounds_leave_an_eighth_of_the_host_to_other_requests(kind: Kind) -> None:
    world = next_engine(kind, LONG[:65], host=16)
    runs = world.admitted("runs", OTHER)
    request = wait_for_rounds(world, world.add("late", LONG[:65]))
    assert request.brought == (0, 56)
    world.run(runs)
    world.finish()
    assert world.on_host(OTHER) == "xx.."


@on_each_tier
def test_a_first_round_may_fill_the_last_slots_of_the_host(kind: Kind) -> None:
    world = next_engine(kind, TEXT, host=8)
    world.end(world.add("first", TEXT))  # so that no warm start fetches the text
    world.run(world.admitted("runs", LONG[:29]))
    world.finish()
    assert world.pool.room == 1
    assert world.admit(world.fetched("late", TEXT)) == 4


@on_each_tier
@pytest.mark.parametrize("free", [1, 2, 3])
def test_a_host_that_a_running_request_fills_has_no_room_for_a_second_round(kind: Kind, free: int) -> None:
    """A round after the first leaves an eighth of the host, four blocks here, which is more than has room."""
    world = next_engine(kind, LONG, host=32, blocks=128)
    world.end(world.add("first", LONG))  # so that no warm start fetches the text
    world.run(world.admitted("runs", "".join(map(chr, range(200, 201 + 4 * (32 - free))))))
    world.finish()
    assert world.pool.room == free
    assert world.admit(world.fetched("late", LONG)) == 4 * free


@on_each_tier
def test_slots_that_another_request_holds_for_the_same_prefix_take_no_room(kind: Kind) -> None:
    world = next_engine(kind, LONG[:53], host=16)
    head = wait_for_rounds(world, world.add("head", LONG[:33]))
    world.load_and_run(head)
    world.device.forget_keys()
    request = wait_for_rounds(world, world.add("late", LONG[:53]))
    assert request.brought == (0, 52)
    assert world.copied(LOAD) == 13


@on_each_tier
def test_a_request_reads_no_more_blocks_than_the_host_has_slots(kind: Kind) -> None:
    world = next_engine(kind, LONG[:65], host=16)
    request = world.add("late", LONG[:65])
    for _ in range(20):
        if world.admit(request) is not None:
            break
        world.copy_all()
        for key in keys_of(request.text, world.groups[0]):
            if key in world.pool.index:
                world.lose(key)
    assert (request.brought, world.copied(LOAD)) == ((0, 0), 16)


@on_each_tier
def test_a_host_that_is_still_growing_is_not_reported_as_too_small(kind: Kind) -> None:
    world = next_engine(kind, LONG, host=4, is_growing=True)
    wait_for_rounds(world, world.add("late", LONG))
    assert world.reported(PrefixExceedsHost) == []


@on_each_tier
def test_a_long_prefix_leaves_room_for_other_requests_fetches(kind: Kind) -> None:
    world = next_engine(kind, LONG, OTHER, host=32)
    first = world.add("first", LONG)
    assert world.lookup(first) is None
    world.copy_all()
    assert world.lookup(first) is None
    other = world.add("other", OTHER)
    assert rounds(world) == [8, 4, 3]
    world.copy_all()
    assert world.admit(other) == 12


@on_each_tier
@pytest.mark.parametrize("fails", [False, True])
def test_a_long_prefix_waits_for_its_turn_while_others_are_fetched(kind: Kind, fails: bool) -> None:
    world = next_engine(kind, LONG, OTHER + OTHER[::-1], TEXT + TEXT[::-1], LONG[::-1], host=32, blocks=128)
    first = world.add("first", LONG)
    assert world.lookup(first) is None
    world.copy_all()
    assert world.lookup(first) is None
    world.add("other", OTHER + OTHER[::-1])
    world.idle_step()
    own, others = world.tier_jobs(LOAD)
    world.finish(own, outcome=FAILED if fails else DONE)
    if fails:  # The request gets no other fetch, and waits for none.
        assert world.lookup(first) == 32
        return
    assert world.lookup(first) is None
    world.add("another", TEXT + TEXT[::-1])
    assert rounds(world) == [8, 4, 4, 4]
    assert world.lookup(world.add("has fetched nothing", LONG[::-1])) == 0
    world.finish(others)
    wait_for_rounds(world, first)
    assert first.brought == (0, 84)


@on_each_tier
def test_a_request_that_no_longer_waits_holds_its_prefix_once(kind: Kind) -> None:
    world = next_engine(kind, LONG, host=32)
    request = world.fetched("late", LONG)
    for _ in range(3):
        assert world.lookup(request, may_wait=False)
        world.copy_all()
    assert set(world.pool.holds.values()) == {1}
    world.end(request)
    assert world.pool.holds == {}
    world.drain()


@on_each_tier
def test_a_running_request_with_a_long_prefix_leaves_room_for_stores(kind: Kind) -> None:
    world = next_engine(kind, LONG[:65], host=16)
    request = wait_for_rounds(world, world.add("late", LONG[:65]))
    world.load_and_run(request)
    assert len(world.pool.holds) == 12
    world.serve("other", OTHER[:13])
    assert (world.on_host(LONG[:65]), world.on_host(OTHER)) == ("x" * 13 + "...", "xxx.")
    world.end_and_drain(request)
    assert world.eviction_order()[3:] == keys_of(LONG, world.groups[0])[12::-1]


@on_each_tier
def test_r8_a_running_request_holds_blocks_that_no_lower_tier_has(kind: Kind) -> None:
    world = kind(host=16, min_hits=2)
    world.only_on_host(LONG[:65])
    request = world.admitted("late", LONG[:65])
    world.load_and_run(request)
    assert len(world.pool.holds) == 16
    world.serve("other", OTHER)
    assert (world.on_host(LONG[:65]), world.on_host(OTHER)) == ("x" * 16, "....")


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
    assert world.lookup(world.add("next", TEXT)) is None


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
