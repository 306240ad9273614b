from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from itertools import product
from operator import attrgetter
from typing import Any

import pytest

from kvoffload.core.jobs import Failure, Job, Jobs, Store
from kvoffload.core.machine import (
    JOB,
    REQUEST,
    SLOT,
    JobEvent,
    JobState,
    Machine,
    RequestEvent,
    RequestState,
    SlotEvent,
    SlotState,
)
from kvoffload.core.request import RequestRecord, Requests
from kvoffload.core.slots import SlotPool
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import IllegalTransition
from kvoffload.model.ids import BlockKey, Rank, RequestId, SlotId
from kvoffload.model.wire import Direction, JobReport
from tests.core.audit import pool_problems

by_name = attrgetter("name")
each_slot_state = pytest.mark.parametrize("state", SlotState, ids=by_name)
each_machine = pytest.mark.parametrize("machine", [SLOT, JOB, REQUEST], ids=by_name)


def members(enum: type[IntEnum]) -> list[IntEnum]:
    return list(enum)


@each_machine
def test_each_event_is_allowed_only_in_its_states(machine: Machine[Any, Any]) -> None:
    for event in members(machine.events):
        before = [state for state in members(machine.states) if (state, event) in machine.table]
        for state in members(machine.states):
            if state in before:
                assert machine.steps[event][state] is machine.table[state, event]
                continue
            with pytest.raises(IllegalTransition, match=repr(event)):
                machine.steps[event][state]
        if len(before) == 1:
            assert machine.only[event] == (bytes(before), machine.table[before[0], event])


@each_machine
def test_every_state_is_reached_and_every_event_is_used(machine: Machine[Any, Any]) -> None:
    reached, grown = {members(machine.states)[0]}, True
    while grown:
        after = reached | {machine.table[state, event] for state, event in machine.table if state in reached}
        grown, reached = after != reached, after
    assert reached == set(members(machine.states))
    assert {event for _, event in machine.table} == set(members(machine.events))


def test_slots_hit_and_are_evicted_only_in_the_listed_states() -> None:
    assert {state for (state, event) in SLOT.table if event is SlotEvent.EVICT} == {SlotState.READY}
    assert {state for (state, event) in SLOT.table if event is SlotEvent.PIN} == {SlotState.READY}
    assert not [event for (state, event) in SLOT.table if state is SlotState.QUARANTINED]


# -- the records that the tables move ---------------------------------------------------------------------------


def ready_pool(slots: int) -> tuple[SlotPool, list[SlotId]]:
    pool = SlotPool()
    pool.grow(slots)
    filled, _ = pool.reserve([BlockKey(b"%d" % number) for number in range(slots)])
    pool.fill(filled)
    return pool, list(filled)


def pool_with(state: SlotState) -> tuple[SlotPool, SlotId]:
    """Return a pool of two slots and one of them, in this state. The other slot is empty."""
    pool = SlotPool()
    pool.grow(2)
    if state is SlotState.EMPTY:
        return pool, SlotId(1)
    (slot,), _ = pool.reserve([BlockKey(b"key")])
    if state in (SlotState.READY, SlotState.PINNED, SlotState.DRAINING):
        pool.fill((slot,))
    if state in (SlotState.PINNED, SlotState.DRAINING):
        pool.pin((slot,))
    if state is SlotState.DRAINING:
        pool.invalidate(slot)
    if state is SlotState.QUARANTINED:
        pool.quarantine(slot)
    assert pool.state(slot) is state
    return pool, slot


def picture(pool: SlotPool) -> object:
    states = [pool.state(SlotId(slot)) for slot in range(pool.capacity)], [*map(pool.count, SlotState)]
    return states, dict(pool.index), dict(pool.pins), dict(pool.holds), list(pool.order), pool.room


@each_slot_state
def test_a_refused_call_changes_nothing(state: SlotState) -> None:
    pool, slot = pool_with(state)
    pool.grow(3)
    (good,), _ = pool.reserve([BlockKey(b"good")])
    pool.fill((good,))
    calls: list[Callable[[], object]] = []
    if state is not SlotState.FILLING:
        calls.append(lambda: pool.fill((slot,)))
    if state not in (SlotState.READY, SlotState.PINNED):
        calls.append(lambda: pool.pin((good, slot)))
    if state is SlotState.EMPTY:
        calls.append(lambda: pool.quarantine(slot))
    before = picture(pool)
    for call in calls:
        with pytest.raises(IllegalTransition):
            call()
        assert picture(pool) == before


def test_requesting_more_slots_than_are_free_changes_nothing() -> None:
    pool, _ = pool_with(SlotState.PINNED)
    before = picture(pool)
    with pytest.raises(ValueError, match="2 slots requested, only 1 can be allocated"):
        pool.reserve([BlockKey(b"one"), BlockKey(b"two")])
    assert picture(pool) == before


@each_slot_state
def test_invalidating_and_quarantining_return_whether_the_slot_could_hit(state: SlotState) -> None:
    could_hit = state in (SlotState.READY, SlotState.PINNED)
    pool, slot = pool_with(state)
    assert pool.invalidate(slot) is could_hit
    if state is SlotState.EMPTY:
        return
    pool, slot = pool_with(state)
    assert pool.quarantine(slot) is could_hit
    assert pool.quarantine(slot) is False
    assert pool.count(SlotState.QUARANTINED) == 1
    assert [*pool_problems(pool)] == []


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("end", ["invalidate", "quarantine", "forget_all"])
def test_a_held_slot_can_be_invalidated(end: str, held: bool) -> None:
    pool, slot = pool_with(SlotState.READY)
    holds = 2 * [slot] if held else []
    pool.hold(holds)
    if end == "forget_all":
        pool.forget_all()
    else:
        getattr(pool, end)(slot)
    pool.release(holds)
    assert not pool.index
    assert [*pool_problems(pool)] == []


def test_a_held_slot_that_was_pinned_is_held_again_afterwards() -> None:
    pool, slot = pool_with(SlotState.READY)
    pool.hold([slot])
    pool.pin((slot,))
    pool.unpin((slot,))
    assert list(pool.order) == []
    pool.release([slot])
    assert list(pool.order) == [slot]
    assert [*pool_problems(pool)] == []


def test_using_moves_only_evictable_slots() -> None:
    pool, (slot, other) = ready_pool(2)
    assert pool.use((slot,)) == 1
    assert list(pool.order) == [other, slot]
    pool.hold([slot])
    assert pool.use((slot,)) == 0
    pool.pin((other,))
    assert pool.use((other,)) == 0
    assert list(pool.order) == []


def test_marking_as_used_releases_holds_in_the_same_order() -> None:
    pool, slots = ready_pool(3)
    pool.hold([slots[0], slots[0], slots[1]])
    assert pool.use(slots, slots[:2]) == 2
    assert pool.holds == {slots[0]: 1}
    assert list(pool.order) == [slots[1], slots[2]]
    assert pool.use(slots, slots[:1]) == 3
    assert list(pool.order) == list(slots)
    assert [*pool_problems(pool)] == []


def test_freed_slots_are_reserved_in_order_before_unused_slots() -> None:
    pool, slots = ready_pool(4)
    pool.grow(6)
    for slot in slots:
        pool.invalidate(slot)
    assert pool.reserve([BlockKey(b"new %d" % number) for number in range(6)])[0] == [0, 1, 2, 3, 4, 5]


class Owner:
    """A job's owner that records its notifications."""

    def __init__(self) -> None:
        self.learnt: list[object] = []

    def reported(self, job: Job, rank: Rank, report: JobReport) -> None:
        raise AssertionError(report)

    def failed(self, job: Job, why: Failure) -> None:
        self.learnt.append(why)

    def ended(self, job: Job) -> None:
        self.learnt.append("ended")


def jobs_with(state: JobState) -> tuple[Jobs, Job]:
    jobs = Jobs(ranks=1)
    job = Store(Owner(), [], [])
    jobs.plan(job)
    if state is JobState.CANCELLED:
        jobs.drop(job)
    elif state is not JobState.PLANNED:
        jobs.submit()
    if state is JobState.ABANDONED:
        jobs.time_out(job)
    if state in (JobState.DONE, JobState.FAILED):
        job.failed = CopyOutcome.FAILED if state is JobState.FAILED else None
        jobs.close(job)
    assert job.state is state
    return jobs, job


@pytest.mark.parametrize(
    ("state", "learnt"),
    [
        (JobState.PLANNED, [Failure.CANCELLED, "ended"]),
        (JobState.SUBMITTED, [Failure.DROPPED]),
        (JobState.ABANDONED, []),
    ],
    ids=["PLANNED", "SUBMITTED", "ABANDONED"],
)
def test_a_job_that_is_dropped_is_cancelled_or_runs_to_its_end(state: JobState, learnt: list[object]) -> None:
    jobs, job = jobs_with(state)
    job.settled = state is JobState.ABANDONED  # the job's owner has already been notified
    jobs.drop(job)
    assert job.owner.learnt == learnt  # type: ignore[attr-defined]
    is_cancelled = state is JobState.PLANNED
    assert job.state is (JobState.CANCELLED if is_cancelled else state)
    assert (not jobs.open and not jobs.planned) is is_cancelled


@pytest.mark.parametrize("end", ["time_out", "close"])
@pytest.mark.parametrize("state", JobState, ids=by_name)
def test_a_wrong_event_does_not_change_a_jobs_state(state: JobState, end: str) -> None:
    jobs, job = jobs_with(state)

    def picture() -> object:
        counts = [jobs.count(Direction.STORE, each) for each in JobState]
        return job.state, counts, jobs.pending, list(jobs.open), list(jobs.planned)

    before = picture()
    assert bool(jobs.open) == (state in (JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED))
    event = JobEvent.FAIL if job.failed else JobEvent.FINISH
    if end == "time_out":
        event = JobEvent.ABANDON
    if (state, event) in JOB.table:
        getattr(jobs, end)(job)
        assert job.state is JOB.table[state, event]
    else:
        with pytest.raises(IllegalTransition):
            getattr(jobs, end)(job)
        assert picture() == before


@pytest.mark.parametrize(("state", "event"), [*product(RequestState, RequestEvent)], ids=by_name)
def test_a_wrong_event_does_not_change_a_requests_state(state: RequestState, event: RequestEvent) -> None:
    ways = {
        RequestState.SEEN: [],
        RequestState.LOADING: [RequestEvent.ALLOCATE_AND_LOAD],
        RequestState.RUNNING: [RequestEvent.ALLOCATE],
        RequestState.FINISHING: [RequestEvent.END],
        RequestState.GONE: [RequestEvent.END],
    }
    requests = Requests()
    record = RequestRecord(RequestId("a"), 1, ([],))
    requests.live[record.request] = record
    record.jobs = state is not RequestState.GONE
    for step in ways[state]:
        requests.move(record, step)
    assert record.state is state
    is_live = requests.live.get(record.request) is record
    assert is_live is record.is_live
    if (state, event) in REQUEST.table:
        requests.move(record, event)
        assert record.state is REQUEST.table[state, event]
    else:
        with pytest.raises(IllegalTransition):
            requests.move(record, event)
        assert (record.state, requests.live.get(record.request) is record) == (state, is_live)
