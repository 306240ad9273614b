"""Checks before the promise: an engine that cannot recover a load is told of a hit only when its blocks were read (R1, R9)."""

from __future__ import annotations

import pytest

from kvoffload.core.states import SlotState
from kvoffload.model.causes import CopyOutcome, DegradeCause, LoadOutcome, MissCause
from kvoffload.model.engine import Promises
from kvoffload.model.events import BlocksEvicted, CheckScheduled, LookupDeferred
from kvoffload.model.facts import RankLost
from kvoffload.model.ids import JobId, Rank, SlotId
from kvoffload.model.transfer import Direction
from tests.core.world import Req, World, full, key_at, window

TEXT = "abcdefghijklm"  # three whole blocks, and a token behind them
HEAD = "abcdefghxyz"  # two of them


def checking(*groups: object, **options: object) -> World:
    """A world in which the host has TEXT and the device has forgotten it."""
    promises = Promises(recovers_loads=False)
    world = World(*groups, promises=promises, check_first=True, **options)  # type: ignore[arg-type]
    world.serve("before", TEXT)
    world.device.forget_keys()
    return world


def the_check(world: World) -> JobId:
    """Hand the planned check over."""
    world.idle_step()
    (job,) = world.open_jobs(Direction.CHECK)
    return job


def slot_of(world: World, end: int) -> SlotId:
    return world.core.state.pool.index[key_at(TEXT, end)]


def asked(world: World, name: str = "a", text: str = TEXT) -> Req:
    """A request whose first lookup has begun a check."""
    request = world.add(name, text)
    assert world.lookup(request) is None
    return request


def test_a_hit_is_promised_when_every_rank_has_read_it() -> None:
    world = checking(ranks=2)
    request = asked(world)
    assert world.told(LookupDeferred)[-1] == LookupDeferred(request.name, request.name)
    job = the_check(world)
    assert world.told(CheckScheduled) == [CheckScheduled(job, request.name, 3)]
    world.report(0, job)
    assert world.lookup(request) is None
    assert not world.core.plan().checks  # what is being read is not read again
    world.report(1, job)
    assert world.admit(request) == 12
    world.idle_step()
    world.finish()
    assert world.loads() == {LoadOutcome.LOADED: 3}


def test_an_engine_that_recovers_is_not_kept_waiting() -> None:
    world = World()
    world.serve("before", TEXT)
    world.device.forget_keys()
    assert world.lookup(world.add("a", TEXT)) == 12
    assert not world.told(CheckScheduled)


def test_with_nothing_to_promise_nothing_is_checked() -> None:
    world = checking()
    assert world.lookup(world.add("a", "zzzzyyyyxxxx")) == 0
    assert not world.told(CheckScheduled)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_rots_is_never_promised(rank: int) -> None:
    world = checking(ranks=2)
    bad = slot_of(world, 8)
    world.rot(rank, bad)
    request = asked(world)
    world.finish(the_check(world))
    assert world.count(SlotState.QUARANTINED) == 1
    assert world.core.state.pool.state(bad) is SlotState.QUARANTINED
    assert world.admit(request) == 4  # and the block behind it, which is good, is of no use
    assert world.miss() is MissCause.CORRUPT
    assert [event.blocks for event in world.told(BlocksEvicted) if event.cause.value == "corrupt"] == [1]


def test_of_a_window_what_is_needed_instead_is_checked_too() -> None:
    """With its last block gone, a shorter hit needs another window."""
    world = checking(full(), window(5, group=1))
    assert world.on_host(TEXT) == "xxx"
    bad = world.core.state.pool.index[key_at(TEXT, 12, 1)]
    world.rot(0, bad)
    request = asked(world)
    first = the_check(world)
    read = set(world.copies[first].job.slots)
    world.finish(first)
    assert world.lookup(request) is None
    second = the_check(world)
    assert read.isdisjoint(world.copies[second].job.slots)
    world.finish(second)
    assert world.lookup(request) == 8
    assert world.core.state.pool.state(bad) is SlotState.QUARANTINED


def test_a_check_that_fails_costs_its_slots_and_nobody_waits_again() -> None:
    world = checking()
    request = asked(world)
    world.finish(the_check(world), outcome=CopyOutcome.FAILED)
    assert world.admit(request) == 0
    assert world.miss() is MissCause.LOAD_FAILED
    assert world.count(SlotState.QUARANTINED) == 0


def test_one_that_may_not_wait_any_longer_is_promised_nothing() -> None:
    world = checking()
    request = asked(world)
    job = the_check(world)
    assert world.admit(request, may_wait=False) == 0
    assert world.miss() is MissCause.NOT_CHECKED
    world.finish(job)
    world.end(request)
    world.drain()
    assert world.core.audit() == []


def test_what_one_had_read_another_need_not_read_while_it_is_pinned() -> None:
    world = checking()
    first, second = asked(world), asked(world, "b", HEAD)
    job = the_check(world)
    assert len(world.told(CheckScheduled)) == 1  # the second waits for what the first has read
    world.finish(job)
    assert world.lookup(second) == 8
    assert world.lookup(first) == 12
    third = world.add("c", HEAD)
    assert world.lookup(third) == 8
    for request in (first, second, third):
        world.end(request)
    assert not world.core.state.checked.checked()
    assert world.lookup(world.add("d", HEAD)) is None  # nothing kept its slots since


def test_a_request_that_ends_leaves_its_check_to_itself() -> None:
    world = checking()
    request = asked(world)
    world.end(request)
    assert world.core.has_work
    job = the_check(world)
    assert world.count(SlotState.PINNED) == 3  # nothing is stored over what is being read
    world.finish(job)
    assert not world.core.has_work
    assert not world.core.state.checked.checked()
    assert world.core.audit() == []


def test_r10_after_a_reset_a_check_of_before_is_worth_nothing() -> None:
    world = checking()
    request = asked(world)
    job = the_check(world)
    world.reset()
    assert world.lookup(request) == 0
    world.finish(job)
    assert world.lookup(request) == 0
    assert world.count(SlotState.DRAINING) == 0


@pytest.mark.parametrize("late_end", [True, False])
def test_r16_a_check_that_never_ends_costs_its_slots_for_good(late_end: bool) -> None:
    world = checking(ranks=2)
    request = asked(world)
    job = the_check(world)
    world.report(0, job)
    if late_end:
        world.overdue(job)
    else:
        world.tell(RankLost(Rank(1)))
    assert world.count(SlotState.QUARANTINED) == 3
    assert world.admit(request) == 0
    assert not world.core.state.pool.pins()  # nothing is kept of what was written off
    world.report(1, job)
    assert world.count(SlotState.QUARANTINED) == 3
    assert world.core.state.jobs.get(job) is None


def test_r12_when_offloading_is_switched_off_no_check_begins() -> None:
    world = checking()
    request = asked(world)
    world.degrade()
    assert world.core.state.degraded is DegradeCause.LAW_BROKEN
    assert world.idle_step().is_empty
    assert world.core.is_drained
    assert world.admit(request) == 0
    assert world.core.audit() == []


def test_the_audit_sees_what_counts_as_checked_for_nobody() -> None:
    world = checking()
    asked(world)
    checked = world.core.state.checked
    checked._checked.add(SlotId(60))
    checked._reading.clear()
    told = " ".join(world.core.audit())
    assert "count as checked" in told
    assert "being read" in told
