from __future__ import annotations

import gc
from typing import Any

import pytest
from msgspec import structs

from kvoffload.core.jobs import Fetch, Spill
from kvoffload.core.lower_tiers import MOST_STEPS
from kvoffload.core.machine import SlotState
from kvoffload.core.match import Match, longest_match
from kvoffload.core.request import RequestRecord
from kvoffload.core.tiers import LayeredIndex
from kvoffload.model import facts
from kvoffload.model.causes import EvictionCause, MissCause, TierOutcome
from kvoffload.model.events import (
    BlocksEvicted,
    LookupDeferred,
    TierBlocksEvicted,
    TierReady,
)
from kvoffload.model.ids import SlotId
from kvoffload.model.wire import Tier
from tests.core.disk_world import DiskWorld
from tests.core.lower_world import LOAD, OTHER, STORE, TEXT
from tests.core.world import FAILED, keys_of

OTHERS = [OTHER, OTHER.lower()[::-1], OTHER[::-1]]
THIRD = "0123456789abcdef"


def test_blocks_of_a_request_that_must_not_persist_are_neither_spilled_nor_found() -> None:
    world = DiskWorld.holding(TEXT)
    world.persists = False
    before = dict(world.index)
    alone = world.add("alone", TEXT)
    assert world.admit(alone) == 0
    world.run(alone)
    world.end(alone)
    world.settle()
    world.serve("own", OTHER)
    world.serve_again("own again", OTHER)
    assert world.index == before


def searches_of(module: str, monkeypatch: pytest.MonkeyPatch) -> list[Match]:
    """Return a list to which the module's searches append their results."""
    found: list[Match] = []

    def search(*arguments: Any) -> Match:  # noqa: ANN401
        found.append(longest_match(*arguments))
        return found[-1]

    monkeypatch.setattr(f"kvoffload.core.{module}.longest_match", search)
    return found


def test_a_lookup_does_not_search_while_it_waits_for_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = DiskWorld.holding(TEXT, host=16)
    request, shares = world.add("late", TEXT), world.add("shares", TEXT)
    searches = searches_of("loads", monkeypatch)
    assert [world.lookup(request) for _ in range(5)] == [None] * 5
    assert not searches
    assert [world.lookup(shares) for _ in range(5)] == [None] * 5
    assert len(searches) == 1
    assert len(world.reported(LookupDeferred)) == 2
    assert world.lookup(request, may_wait=False) == 0
    assert world.lookup(request) is None
    assert len(world.reported(LookupDeferred)) == 3  # a wait after an answer counts as a new wait
    world.copy_all()
    assert world.admit(request) == 12
    world.load_and_run(request)


def test_no_tier_is_searched_if_none_has_the_next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    world = DiskWorld.holding(TEXT, host=16)
    world.serve("head", OTHER[:9])
    searches = searches_of("lower_tiers", monkeypatch)
    world.add("late", OTHER)
    assert searches == []


def test_a_head_that_the_host_lost_before_its_tail_is_fetched_by_the_lookup() -> None:
    world = DiskWorld(host=16)
    world.serve_twice(TEXT)
    world.device.forget_keys()
    world.lose(keys_of(TEXT, world.groups[0])[0])
    assert world.lookup(world.fetched("late")) == 12


def test_a_lookup_does_not_wait_for_a_fetch_that_the_device_has_overtaken() -> None:
    world = DiskWorld.holding(TEXT, host=16)
    late, impatient = world.add("late", TEXT), world.add("impatient", TEXT)
    assert world.lookup(late) is None
    assert world.admit(impatient, may_wait=False) == 0
    world.run(impatient)
    assert world.tier_jobs(LOAD)
    assert world.lookup(late) == 0
    world.finish()


@pytest.mark.parametrize("trouble", ["its load failed", "copies stall"])
def test_a_request_that_cannot_load_does_not_wait_for_a_fetch(trouble: str) -> None:
    world = DiskWorld.holding(TEXT, host=16)
    request, state = world.add("late", TEXT), world.core.state
    assert world.lookup(request) is None
    if trouble == "copies stall":
        state.stall.is_on = True
    else:
        state.requests.live[request.name].load_failed = True
    assert world.lookup(request) == 0
    state.stall.is_on = False
    world.finish()


def test_a_prefixs_blocks_on_the_host_are_kept_without_a_pin_while_the_rest_is_fetched() -> None:
    world = DiskWorld.holding(TEXT, host=16)
    world.only_on_host(TEXT[:9])
    request = world.add("late", TEXT)
    assert world.lookup(request, may_wait=False) == 8
    assert world.count(SlotState.PINNED) == 2
    assert world.lookup(request) is None
    assert (world.on_host(TEXT)[:2], world.count(SlotState.PINNED)) == ("xx", 0)
    world.copy_all()
    assert world.admit(request) == 12


def test_without_deferred_lookups_the_next_request_finds_the_fetched_blocks() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    first = world.add("first", TEXT)
    assert world.admit(first, may_wait=False) == 0
    assert world.miss() is MissCause.ON_DISK
    world.load_and_run(first)
    world.end_and_drain(first)
    world.device.forget_keys()
    assert world.admit(world.add("second", TEXT), may_wait=False) == 12


def test_fetches_fill_at_most_a_quarter_of_the_host_and_start_with_heads() -> None:
    texts = [letter * 17 for letter in "abc"]
    world = DiskWorld.holding(*texts, host=16, disk=64)
    requests = [world.add(f"late{number}", text) for number, text in enumerate(texts)]
    for request in requests:
        world.lookup(request)
    assert world.disk.fetching == 4
    world.copy_all()
    assert world.on_host(texts[0]) == "xxxx"
    assert [world.on_host(text) for text in texts[1:]] == ["....", "...."]
    assert world.lookup(requests[1]) is None
    assert world.tier_jobs(LOAD) == []
    world.copy_all()
    assert world.on_host(texts[1]) == "xxxx"


# -- ranks ------------------------------------------------------------------------------------------------------


def test_r17_changed_host_bytes_are_not_written_and_their_slots_are_quarantined() -> None:
    world = DiskWorld(ranks=2)
    job = world.spilling()
    bad = world.copies[job].job.slots[1]
    world.rot(1, bad)
    world.report(0, job)
    world.report(1, job)
    assert world.copied(STORE, TierOutcome.CORRUPT) == 3
    assert (world.below(TEXT), world.index) == ("....", {})
    assert world.on_host(TEXT) == "x.xx"
    assert world.pool.state(bad) is SlotState.QUARANTINED
    assert world.disk.pool.room == 32
    assert world.reported(BlocksEvicted) == [BlocksEvicted(1, EvictionCause.CORRUPT)]
    assert world.next_miss() is MissCause.CORRUPT


def test_r17_a_slot_is_invalidated_before_it_is_written_again() -> None:
    world = DiskWorld.holding(TEXT, disk=3)
    assert len(world.index) == 3
    world.serve("other", OTHER)
    world.serve("other again", OTHER, drains=False)
    world.idle_step()
    assert world.index == {}
    world.settle()
    assert (world.below(TEXT), world.below(OTHER)) == ("....", "xxx.")
    assert world.reported(TierBlocksEvicted) == [TierBlocksEvicted(Tier.DISK, 3, EvictionCause.SPACE)]


def test_r16_a_host_slot_under_a_hanging_read_is_never_allocated_again() -> None:
    world = DiskWorld.holding(TEXT, ranks=2, host=32)
    room = world.pool.room
    _, job = world.fetching()
    world.report(0, job, FAILED, stuck=(1, 2))
    world.report(1, job, FAILED, stuck=(2,))
    world.settle()
    assert world.count(SlotState.QUARANTINED) == 2
    assert world.pool.room == room - 2


def test_a_fetch_creates_no_reference_cycles() -> None:
    world = DiskWorld.holding(TEXT, host=16)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        request = world.fetched("gone", TEXT)
        world.end(request)  # The request ends before a lookup has returned the fetched blocks.
        world.settle()
        gc.collect()
        left = {type(found) for found in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left.isdisjoint({Fetch, Spill, LayeredIndex, RequestRecord})


def test_r17_corrupt_bytes_are_removed_and_never_served() -> None:
    world = DiskWorld.holding(TEXT, ranks=2, host=32)
    world.spoil(1, TEXT[:12])
    request = world.fetched("late")
    assert world.copied(LOAD, TierOutcome.CORRUPT) == 3
    assert world.below(TEXT) == "xx.."
    assert world.admit(request) == 0
    world.run(request)
    world.device.forget_keys()
    world.add("next", TEXT)
    world.copy_all()
    assert world.admit(world.requests["next"]) == 12
    world.step_and_copy()


def test_r16_a_hanging_disk_gets_no_jobs_until_it_has_answered() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    request, job = world.fetching()
    slots = world.copies[job].job.slots
    world.overdue(job)
    assert world.admit(request) == 0
    assert world.lookup(world.add("next", TEXT)) == 0, "a disk that does not answer is asked again"
    world.report(0, job)
    assert world.lookup(world.add("third", TEXT)) is None
    world.copy_all()
    world.run(request)
    assert {world.pool.state(slot) for slot in slots} == {SlotState.QUARANTINED}


@pytest.mark.parametrize(("how", "lost"), [("hangs", 1), ("times out", 3)])
def test_r16_disk_slots_under_an_endless_write_are_never_reused(how: str, lost: int) -> None:
    world = DiskWorld(disk=4)
    job = world.spilling()
    if how == "times out":
        world.overdue(job)
        assert world.disk.pool.room == 1
        world.report(0, job)
        assert world.index == {}
    else:
        world.report(0, job, FAILED, stuck=(1,))
        world.settle()
    assert world.disk.pool.room == 4 - lost


# -- order ------------------------------------------------------------------------------------------------------


def test_spills_wait_for_loads_and_fetches() -> None:
    world = DiskWorld.holding(TEXT, host=16)
    world.serve("other", OTHER)
    world.serve("other again", OTHER, drains=False)
    request = world.add("late", TEXT)
    world.lookup(request)
    world.idle_step()
    assert (len(world.tier_jobs(LOAD)), world.tier_jobs(STORE)) == (1, [])
    world.finish()
    world.idle_step()
    assert len(world.tier_jobs(STORE)) == 1


def gathering() -> DiskWorld:
    """Return a world with a running request and three spill candidates, which wait to share a job."""
    world = DiskWorld(host=64, disk=64)
    world.serve_twice(TEXT)
    for text in OTHERS:
        world.serve(text, text)
    world.add("runs on", "?")
    world.serve("again", OTHERS[0], drains=False)
    world.idle_step()
    assert (len(world.disk.candidates), world.tier_jobs(STORE)) == (3, [])
    return world


@pytest.mark.parametrize(
    ("until", "blocks"), [("more come", 8), ("many steps have passed", 3), ("no request is left", 3)]
)
def test_few_spill_candidates_wait_until_a_job_is_worth_it(until: str, blocks: int) -> None:
    world = gathering()
    if until == "more come":
        for text in OTHERS[1:]:
            assert world.tier_jobs(STORE) == []
            world.serve(f"{text} again", text, drains=False)
    elif until == "many steps have passed":
        for _ in range(MOST_STEPS - 1):
            world.idle_step()
    else:
        world.end(world.requests["runs on"])
    assert len(world.copies[world.start_job(STORE)].job.slots) == blocks


def test_blocks_evicted_before_their_spill_are_counted() -> None:
    world = DiskWorld(host=4)
    world.serve("once", TEXT)
    world.fails()
    world.serve("again", TEXT, drains=False)
    world.empty_host()
    evicted = world.reported(BlocksEvicted)
    assert sum(each.blocks for each in evicted if each.cause is EvictionCause.SPILL_BEHIND) == 3


def test_a_block_computed_during_its_fetch_uses_one_slot() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    waiting = world.add("waiting", TEXT)
    assert world.lookup(waiting) is None
    world.idle_step()
    hasty = world.add("hasty", TEXT)
    world.admit(hasty, may_wait=False)
    world.run(hasty)
    world.finish()
    world.end_and_drain(hasty)
    assert world.on_host(TEXT) == "xxxx"


# -- reset and restart ------------------------------------------------------------------------------------------


def test_r10_the_next_engine_finds_nothing_from_before_a_reset() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    world.reset()
    again = DiskWorld(host=32, before=world)
    assert again.lookup(again.add("later", TEXT)) == 0


def test_r10_a_spill_planned_before_a_reset_is_cancelled() -> None:
    world = DiskWorld()
    world.serve("once", TEXT)
    world.serve("again", TEXT, drains=False)
    world.checks_each_fact = False
    world.tell(facts.StepScheduled(world.steps))
    assert len(world.disk.in_flight.keys) == 3
    world.reset()
    world.idle_step()
    assert world.copies == {}


def test_r18_the_next_engine_finds_all_put_blocks() -> None:
    first = DiskWorld.holding(TEXT, OTHER, ranks=2)
    second = DiskWorld(ranks=2, before=first)
    request = second.fetched("late", TEXT)
    assert second.admit(request) == 12
    second.load_and_run(request)
    third = DiskWorld(ranks=2, before=second)
    assert (third.below(TEXT), third.below(OTHER)) == ("xxx.", "xxx.")


def test_the_next_engine_evicts_the_most_recently_read_blocks_last() -> None:
    first = DiskWorld.holding(TEXT, OTHER, host=32, disk=6)
    first.fetched("late")
    second = DiskWorld(before=first, disk=6)
    second.serve_twice(THIRD)
    assert (second.below(TEXT), second.below(OTHER), second.below(THIRD)) == ("xxx.", "....", "xxx.")


def test_a_smaller_disk_keeps_the_most_recently_used_blocks_of_all_slots() -> None:
    first = DiskWorld.holding(TEXT, OTHER, disk=6)
    assert sorted(first.index) == list(range(6))
    second = DiskWorld(before=first, disk=4)
    assert second.reported(TierReady) == [TierReady(Tier.DISK, 4, 4)]
    assert (second.below(TEXT), second.below(OTHER)) == ("x...", "xxx.")
    assert second.disk.pool.room == 4
    second.serve_twice(THIRD)
    assert (second.below(TEXT), second.below(OTHER), second.below(THIRD)) == ("....", "x...", "xxx.")


def test_a_block_that_the_index_names_twice_uses_one_slot() -> None:
    first = DiskWorld.holding(TEXT)
    put = next(iter(first.index.values()))
    first.index[SlotId(0)] = structs.replace(put, slot=SlotId(0))
    second = DiskWorld(before=first, opens=False)
    del second.index[SlotId(0)]
    second.open()
    assert (second.below(TEXT), second.disk.pool.room) == ("xxx.", 32)


def test_misses_before_the_index_is_read_have_their_own_cause() -> None:
    first = DiskWorld.holding(TEXT)
    second = DiskWorld(before=first, opens=False)
    request = second.add("early", TEXT)
    second.index.clear()
    assert second.admit(request) == 0
    assert second.miss() is MissCause.TIER_OPENING
