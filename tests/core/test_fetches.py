"""Fetches for a request, fetches before any request (a warm start), and the number of blocks per fetch."""

from __future__ import annotations

from typing import cast

import pytest

from kvoffload.core.jobs import Jobs, Owner, Spill
from kvoffload.core.machine import SlotState
from kvoffload.core.tiers import LowerTier
from kvoffload.model.causes import MissCause, TierOutcome
from kvoffload.model.events import LookupDeferred, TierCopyScheduled
from kvoffload.model.ids import JobId, SlotId
from kvoffload.model.wire import Direction, Tier
from tests.core.disk_world import DiskWorld
from tests.core.world import full, key_at, recurrent, window

LOAD, STORE = Direction.LOAD, Direction.STORE
TEXT = "abcdefghijklmnop"  # four blocks; a lookup finds three of them
OTHER = "ABCDEFGHIJKLMNOP"


def fetches(world: DiskWorld) -> list[TierCopyScheduled]:
    return [each for each in world.reported(TierCopyScheduled) if each.direction is LOAD]


# -- with its request -------------------------------------------------------------------------------------------


def test_a_fetch_begins_when_its_request_arrives() -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT)
    request = world.add("late", TEXT)
    assert [(each.blocks, each.request, each.tokens) for each in fetches(world)] == [(3, request.name, 12)]
    world.idle_step()
    world.finish()
    assert world.admit(request) == 12


def test_at_an_arrival_nothing_is_fetched_that_the_device_or_the_host_has() -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT, OTHER)
    world.serve("on the device", TEXT)
    world.settle()
    before = len(fetches(world))
    world.add("late", TEXT)
    assert len(fetches(world)) == before


def test_at_an_arrival_the_disk_continues_what_the_device_alone_has() -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT)
    [block] = world.device.hand_out(1)
    world.device.name(block, key_at(TEXT, 4))
    world.add("late", TEXT)
    assert fetches(world)[-1].blocks == 2


def test_windows_and_states_are_fetched_at_an_arrival() -> None:
    for group in (window(6, group=1), recurrent(group=1)):
        world = DiskWorld(full(), group, host=64, disk=64)
        world.only_on_disk(TEXT)
        before = len(fetches(world))
        request = world.add("late", TEXT)
        assert len(fetches(world)) == before + 1
        world.idle_step()
        world.finish()
        assert world.admit(request)
        assert len(fetches(world)) == before + 1


def test_nothing_is_fetched_for_tokens_that_are_computed_anyway() -> None:
    world = DiskWorld(host=32, least=13)
    world.only_on_disk(TEXT)
    request = world.add("late", TEXT)
    assert world.admit(request) == 0
    own = world.add("opted out", TEXT, reads_cache=False)
    assert world.admit(own) == 0
    assert fetches(world) == []


def test_a_request_that_goes_before_its_lookup_takes_its_fetch_along() -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT)
    request = world.add("late", TEXT)
    world.end(request)
    assert world.disk_copies(LOAD, TierOutcome.CANCELLED) == 3
    assert world.idle_step().disk == ()
    assert world.copies == {}
    assert world.on_disk(TEXT) == "xxx."


def test_a_submitted_fetch_is_cancelled_and_its_blocks_are_not_found() -> None:
    world = DiskWorld(ranks=2, host=32)
    world.only_on_disk(TEXT)
    request = world.add("late", TEXT)
    world.idle_step()
    [job] = world.disk_jobs(LOAD)
    world.end(request)
    assert world.idle_step().cancelled == (job,)
    assert world.idle_step().cancelled == ()
    world.report(0, job)
    assert world.count(SlotState.DRAINING) == 3
    world.report(1, job)
    assert (world.on_host(TEXT), world.on_disk(TEXT)) == ("....", "xxx.")
    assert world.count(SlotState.DRAINING) == 0


def test_a_fetch_that_another_request_waits_for_goes_on() -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT)
    first, second = world.add("first", TEXT), world.add("second", TEXT)
    assert world.lookup(second) is None
    world.end(first)
    assert world.idle_step().cancelled == ()
    world.finish()
    assert world.admit(second) == 12


def test_a_request_waits_once_for_the_fetches_of_others() -> None:
    """The request waits for the fetch of its last block, regardless of the order in which the jobs were created."""
    text = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    world = DiskWorld(host=64)
    world.only_on_disk(text)
    for blocks in range(1, 9):
        world.add(f"{blocks} blocks", text[: 4 * blocks + 1])
    assert [each.blocks for each in fetches(world)] == [1] * 8
    request = world.add("late", text)
    assert world.lookup(request) is None
    world.idle_step()
    for job in world.disk_jobs(LOAD)[:-1]:
        world.report(0, job)
        assert world.lookup(request) is None
    assert len(world.reported(LookupDeferred)) == 1
    world.finish()
    assert world.admit(request) == 32


def test_a_request_that_was_admitted_leaves_its_fetch_for_the_next_one() -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT)
    hasty = world.add("hasty", TEXT)
    world.admit(hasty, may_wait=False)
    world.step()
    world.end(hasty)
    world.finish()
    assert world.disk_copies(LOAD, TierOutcome.DONE) == 3


def test_what_the_disk_adds_is_computed_where_it_is_shorter_than_the_break_even() -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT)
    world.least_from[Tier.DISK] = 13
    world.lookup(world.add("first", "unknown"))
    request = world.add("late", TEXT)
    assert world.admit(request) == 0
    assert world.miss() is MissCause.ON_DISK
    assert fetches(world) == []
    world.least_from[Tier.DISK] = 12
    assert world.lookup(world.add("next", TEXT)) is None


@pytest.mark.parametrize(("least", "count"), [(12, 1), (13, 0)])
def test_at_an_arrival_no_hit_is_fetched_that_the_settings_have_computed(least: int, count: int) -> None:
    world = DiskWorld(host=32, least=least)
    world.only_on_disk(TEXT)
    world.add("late", TEXT)
    assert len(fetches(world)) == count


@pytest.mark.parametrize(("least", "answer"), [(12, None), (13, 0)])
def test_a_lookup_fetches_no_hit_that_measurements_have_computed(least: int, answer: int | None) -> None:
    world = DiskWorld(host=32)
    world.only_on_disk(TEXT)
    world.least_from[Tier.DISK] = 13  # so that the arrival starts no fetch
    world.lookup(world.add("first", "unknown"))
    request = world.add("late", TEXT)
    world.least_from[Tier.DISK] = 0
    assert world.lookup(request, least=least) is answer


# -- before any request -----------------------------------------------------------------------------------------


def restarted(before: DiskWorld, *, host: int, disk: int = 32) -> DiskWorld:
    world = DiskWorld(before=before, host=host, disk=disk)
    world.settle()
    return world


def test_after_a_restart_the_most_recently_used_come_to_the_host() -> None:
    first = DiskWorld(host=16)
    first.only_on_disk(TEXT, OTHER)
    world = restarted(first, host=16)
    assert (world.on_host(TEXT), world.on_host(OTHER)) == ("x...", "xxx.")
    assert {each.request for each in fetches(world)} == {None}
    assert world.admit(world.add("late", OTHER)) == 12


def test_a_warm_start_keeps_the_order_of_use_on_host_and_disk() -> None:
    first = DiskWorld(host=16, disk=6)
    first.only_on_disk(TEXT, OTHER)
    third = "0123456789abcdef"
    world = restarted(first, host=16, disk=6)
    world.serve("third", third)
    world.serve_again("third again", third)
    assert (world.on_disk(TEXT), world.on_disk(OTHER)) == ("....", "xxx.")
    while world.on_host(OTHER) == "xxx.":
        assert world.on_host(TEXT) in ("x...", "....")
        name = f"filler{len(world.log)}"
        world.serve(name, f"{len(world.log):04}?")
    assert world.on_host(TEXT) == "...."
    assert world.on_host(OTHER) == "xx.."


def test_r15_a_warm_start_leaves_a_prefix_to_the_request_that_looks_for_it() -> None:
    first = DiskWorld(host=32)
    first.only_on_disk(TEXT, OTHER)
    world = DiskWorld(before=first, host=32)
    world.end(world.add("late", TEXT))
    world.settle()
    assert (world.on_host(TEXT), world.on_host(OTHER)) == ("....", "xxx.")


def test_a_warm_start_evicts_nothing() -> None:
    first = DiskWorld(host=16)
    first.only_on_disk(TEXT)
    world = DiskWorld(before=first, host=4, opens=False)
    world.serve("other", OTHER)
    world.open()
    world.settle()
    assert (world.on_host(OTHER), fetches(world)) == ("xxxx", [])
    world.device.forget_keys()
    world.empty_host()
    assert fetches(world) == []


def test_a_warm_start_waits_for_loads_and_for_fetches_of_requests() -> None:
    first = DiskWorld(host=32)
    first.only_on_disk(TEXT, OTHER)
    world = DiskWorld(before=first, host=32)
    world.add("late", TEXT)
    world.idle_step()
    assert len(world.disk_jobs(LOAD)) == 1
    world.idle_step()
    assert len(world.disk_jobs(LOAD)) == 1
    world.settle()
    assert world.on_host(OTHER) == "xxx."


def test_a_warm_start_waits_until_host_memory_is_ready() -> None:
    first = DiskWorld(host=16)
    first.only_on_disk(TEXT)
    world = DiskWorld(before=first, host=4, is_growing=True)
    world.idle_step()
    assert fetches(world) == []
    world.ready_up_to(16)
    world.settle()
    assert world.on_host(TEXT) == "xxx."


def test_r10_after_a_reset_there_is_no_warm_start() -> None:
    first = DiskWorld(host=16)
    first.only_on_disk(TEXT)
    world = DiskWorld(before=first, host=16)
    world.reset()
    world.settle()
    assert fetches(world) == []


# -- how much at a time -----------------------------------------------------------------------------------------


NO_OWNER = cast("Owner[Spill]", None)


def ended(tier: LowerTier, number: int, *, last: int = 0, is_load_open: bool = False) -> float:
    """End a spill; return the new limit on blocks per spill."""
    slots = list(map(SlotId, range(16)))
    job = Spill(NO_OWNER, slots, [], keys=[], tier_slots=[], id=JobId(number), copy_s=1.0)
    tier.spill_ended(job, JobId(max(last, number)), is_load_open=is_load_open)
    return tier.limit.share


def test_the_limit_is_64_mib_and_an_eighth_of_the_host() -> None:
    tier = LowerTier(Tier.DISK, 1, Jobs(1))
    tier.slot_bytes = 2**20
    assert (tier.spill_slots(10_000), tier.spill_slots(80), tier.spill_slots(1)) == (64, 10, 1)
    tier.slot_bytes = 2**30
    assert tier.spill_slots(10_000) == 1


def test_a_spill_beside_a_load_halves_the_limit_once_for_all_planned_before() -> None:
    tier = LowerTier(Tier.DISK, 1, Jobs(1))
    assert ended(tier, 0, last=3, is_load_open=True) == 1 / 2
    assert ended(tier, 3, is_load_open=True) == 1 / 2
    assert [ended(tier, number, is_load_open=True) for number in (4, 5, 6)] == [1 / 4, 1 / 8, 1 / 8]
    assert ended(tier, 7) == 1 / 4


def test_spills_that_meet_loads_hold_fewer_slots() -> None:
    world = DiskWorld(host=64, disk=64)
    texts = [letter * 33 for letter in "abcd"]
    world.disk_fails()
    for text in texts:
        world.serve(f"{text} once", text)
        world.serve(f"{text} again", text, drains=False)
    world.disk_fails(works=True)
    world.idle_step()
    [job] = world.disk_jobs(STORE)
    assert len(world.copies[job].job.slots) == 8
    world.device.forget_keys()
    world.admit(world.add("loads", texts[0]))
    world.idle_step()
    world.report(0, job)
    world.finish()
    world.idle_step()
    [job] = world.disk_jobs(STORE)
    assert len(world.copies[job].job.slots) == 4
