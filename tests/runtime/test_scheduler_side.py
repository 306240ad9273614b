"""The scheduler's side, told by hand: deadlines, patience, pins' ages, gauges, hook times, and what happens when it breaks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from kvoffload.core.state import LoadResults
from kvoffload.core.states import JobState, SlotState
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, DegradeCause
from kvoffload.model.config import OffloadConfig
from kvoffload.model.engine import Promises
from kvoffload.model.errors import ConfigError, EngineContractError
from kvoffload.model.events import Event
from kvoffload.model.ids import JobId, Rank, RequestId
from kvoffload.model.transfer import Direction, TransferPlan
from kvoffload.runtime.scheduler_side import Clocks, SchedulerSide
from kvoffload.telemetry.labels import Hook, JobLabel, SlotLabel
from kvoffload.telemetry.snapshot import conservation
from tests.runtime.parts import BLOCK, SHAPE, TIMEOUT_S, Pool, Side

RELOAD = 3 * BLOCK


def loading(side: Side, name: str = "a") -> TransferPlan:
    """A request whose load was handed to the workers."""
    side.stored()
    side.seen(name)
    assert side.side.lookup(RequestId(name), 0) == RELOAD
    side.allocated(name, RELOAD)
    plan = side.step()
    assert plan.loads
    return plan


# -- deadlines --------------------------------------------------------------------------------------------------


def test_a_job_is_abandoned_after_its_time_and_not_before() -> None:
    side = Side()
    loading(side)
    side.clock.jump(TIMEOUT_S - 0.1)
    side.step()
    assert side.side.core.state.jobs.count(Direction.LOAD, JobState.SUBMITTED) == 1
    side.clock.jump(0.1)
    side.step()
    assert side.side.core.state.jobs.count(Direction.LOAD, JobState.ABANDONED) == 1
    assert side.side.take_results() == LoadResults(failed=[RequestId("a")])
    assert not side.side.has_work


def test_jobs_that_have_ended_are_not_overdue() -> None:
    side = Side()
    assert side.done(loading(side)) == (["a"], [])
    side.clock.jump(2 * TIMEOUT_S)
    side.step(("a", RELOAD))
    assert side.side.counters.snapshot().total("kvoffload_load_blocks_total") == 3
    assert side.side.audit() == []


def test_a_lookup_may_wait_for_anothers_load_until_its_patience_ends() -> None:
    side = Side()
    loading(side)
    other = side.seen("b")
    assert side.side.lookup(other, 0) is None
    side.clock.jump(TIMEOUT_S - 0.1)
    assert side.side.lookup(other, 0) is None
    side.clock.jump(0.1)
    assert side.side.lookup(other, 0) == RELOAD
    side.allocated("b", RELOAD)  # and its patience is new
    side.done(side.step())
    side.step(("b", RELOAD), preempted=["b"])
    assert not side.side._patience._since
    side.ended("b")
    side.ended("a")


def test_a_request_that_ends_while_it_waits_leaves_nothing() -> None:
    side = Side()
    loading(side)
    assert side.side.lookup(side.seen("b"), 0) is None
    side.ended("b")
    assert not side.side._patience._since


# -- pins' ages -------------------------------------------------------------------------------------------------


def test_the_oldest_pin_is_told_while_there_is_one() -> None:
    side = Side()
    side.stored()
    side.seen("a")
    side.seen("b")
    assert side.side.gauges().oldest_pin_s == 0
    side.clock.jump(5)
    first = side.clock.monotonic()
    side.side.lookup(RequestId("a"), 0)
    side.clock.jump(5)
    side.side.lookup(RequestId("b"), 0)
    assert side.side.gauges().oldest_pin_s == first
    side.allocated("a", RELOAD)  # the load's pins are as old as the lookup's
    plan = side.step()
    assert side.side.gauges().oldest_pin_s == first
    side.done(plan)
    assert side.side.gauges().oldest_pin_s == first + 5
    side.ended("b")
    assert side.side.gauges().oldest_pin_s == 0


# -- gauges -----------------------------------------------------------------------------------------------------


def test_labels_name_the_cores_states() -> None:
    assert {label.name: label.value for label in SlotLabel} == {
        state.name: state.name.lower() for state in SlotState
    }
    holds_memory = {JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED}
    assert {label.name for label in JobLabel} == {state.name for state in holds_memory}


def test_gauges_follow_slots_and_jobs() -> None:
    side = Side(slots=7)
    loading(side)
    now = side.side.gauges()
    assert now.problems() == []
    assert now.capacity_slots == 7
    assert (now.slots["pinned"], now.slots["empty"]) == (3, 4)
    assert now.open_jobs["load", "submitted"] == 1
    assert now.degraded is None
    side.clock.jump(TIMEOUT_S)
    side.step()
    now = side.side.gauges()
    assert (now.slots["quarantined"], now.open_jobs["load", "abandoned"]) == (3, 1)


# -- hook times -------------------------------------------------------------------------------------------------


def test_each_hook_gives_one_sample_a_step() -> None:
    side = Side()
    side.stored()
    before = side.side.counters.snapshot()
    for name in ("a", "b"):
        side.seen(name)
    for _ in range(3):
        side.side.lookup(RequestId("a"), 0)
    side.allocated("a", RELOAD)
    side.step()
    gained = side.side.counters.snapshot().minus(before)
    for hook in (Hook.SEEN, Hook.LOOKUP, Hook.ALLOCATED, Hook.STEP):
        assert gained.samples("kvoffload_hook_seconds", hook.value) == 1
    assert gained.samples("kvoffload_hook_seconds", Hook.RESET.value) == 0
    side.side.reset()
    side.side.states_handed_off(facts.StatesHandedOff(()))
    side.step()
    gained = side.side.counters.snapshot().minus(before)
    assert gained.samples("kvoffload_hook_seconds", Hook.RESET.value) == 1
    assert gained.samples("kvoffload_hook_seconds", Hook.OFFER.value) == 1


def test_a_hooks_time_is_that_of_all_its_calls_also_of_one_that_raises() -> None:
    side = Side()
    with pytest.raises(ZeroDivisionError), side.side._hooks.timed(Hook.LOOKUP):
        side.precise.jump(2)
        raise ZeroDivisionError
    side.side._hooks.add(Hook.LOOKUP, 3)
    side.step()
    series = side.side.counters.snapshot().distributions["kvoffload_hook_seconds"]
    assert series[Hook.LOOKUP.value,].total == 5


# -- events -----------------------------------------------------------------------------------------------------


def test_events_follow_their_fact_in_order() -> None:
    side = Side()
    heard: list[str] = []
    side.side.bus.count(facts.Fact, lambda fact: heard.append(type(fact).__name__))
    side.side.bus.count(Event, lambda event: heard.append(type(event).__name__))
    side.done(loading(side))
    side.ended("a")
    assert heard == [
        *("RequestSeen", "BlocksAllocated"),
        *("StepScheduled", "BlocksOffered", "StoreScheduled"),
        *("TransferReported", "RankReported", "StoreSettled"),
        *("RequestEnded", "StepScheduled"),
        *("RequestSeen", "HitPinned", "BlocksAllocated", "LookupSettled", "LoadScheduled", "StepScheduled"),
        *("TransferReported", "RankReported", "LoadEnded", "RequestEnded"),
    ]
    assert conservation(side.side.counters.snapshot(), drained=True) == []


# -- R12 --------------------------------------------------------------------------------------------------------


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def test_switching_off_is_said_once_with_the_journals_tail(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    side.side.bus.on(facts.StepScheduled, boom)
    side.step()
    side.step()
    said = [record.kvoffload for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["event"] for line in said] == ["core_raised", "offloading_off"]
    assert said[0]["doing"] == "StepScheduled"
    assert said[1]["cause"] == DegradeCause.HANDLER_RAISED.value
    assert "StepScheduled" in said[1]["journal"][-3]
    assert side.side.gauges().degraded is DegradeCause.HANDLER_RAISED
    assert side.side.counters.snapshot().total("kvoffload_lookup_blocks_total") == 0


@pytest.mark.parametrize("question", ["lookup", "plan", "take_results"])
def test_a_question_that_raises_is_answered_with_nothing(
    question: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    side.stored()
    side.seen("a")
    monkeypatch.setattr(side.side.core, question, boom)
    assert side.side.lookup(RequestId("a"), 0) in (0, RELOAD)
    assert side.step().is_empty
    assert side.side.take_results() == LoadResults()
    assert side.side.gauges().degraded is DegradeCause.HANDLER_RAISED
    assert f"doing={question}" in caplog.text


def test_what_a_broken_plan_had_submitted_ends_as_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core takes the load as submitted, then raises: no worker will ever report it."""
    side = Side()
    side.stored()
    side.seen("a")
    side.side.lookup(RequestId("a"), 0)
    side.allocated("a", RELOAD)
    monkeypatch.setattr(side.side.core._stores, "submit", boom)
    side.step()
    assert side.side.take_results() == LoadResults()
    assert side.side.has_work
    side.clock.jump(TIMEOUT_S)
    side.step()
    assert side.side.take_results() == LoadResults(failed=[RequestId("a")])
    assert side.side.take_results() == LoadResults()
    assert not side.side.has_work
    assert side.pool.leased  # a copy may run, for all we know


def test_a_load_that_the_core_forgot_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.stored()
    side.seen("a")
    side.side.lookup(RequestId("a"), 0)
    monkeypatch.setattr(side.side.core._loads, "_plan", boom)
    side.allocated("a", RELOAD)
    assert side.side.has_work
    assert side.side.take_results() == LoadResults(failed=[RequestId("a")])
    assert not side.side.has_work


def test_a_load_is_answered_once_though_the_core_comes_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    plan = loading(side)
    side.side.core.state.results.failed.append(RequestId("a"))
    assert side.side.take_results().failed == ["a"]
    assert side.done(plan) == ([], [])


def test_what_never_drains_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.seen("a")
    side.allocated("a")
    for position, block in enumerate(side.last_table):
        side.pool.names[block] = f"p{position}".encode()  # type: ignore[assignment]
    assert side.step(("a", RELOAD)).stores
    monkeypatch.setattr(side.side.core.state.jobs, "move", boom)
    side.clock.jump(TIMEOUT_S)
    side.step()
    assert side.side.gauges().degraded is DegradeCause.HANDLER_RAISED
    assert side.side.has_work
    side.clock.jump(TIMEOUT_S + 1)
    assert not side.side.has_work


def test_an_audit_that_finds_something_switches_offloading_off() -> None:
    side = Side()
    assert side.side.audit() == []
    side.side.core.state.pool._counts[SlotState.EMPTY] -= 1
    assert side.side.audit()
    assert side.side.gauges().degraded is DegradeCause.LAW_BROKEN


# -- start and end ----------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_lease_is_refused() -> None:
    shape = replace(SHAPE, promises=Promises(can_lease=False))
    with pytest.raises(EngineContractError, match="lease"):
        SchedulerSide(shape, OffloadConfig(), Pool())


def test_a_journal_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    side = Side(portal=True)
    with pytest.raises(ConfigError, match="journal_path"):
        SchedulerSide(
            SHAPE, OffloadConfig(journal_path=tmp_path / "no" / "journal"), Pool(), portal=side.portal
        )
    side.close()


def test_a_rank_that_is_lost_takes_its_jobs_with_it() -> None:
    side = Side()
    loading(side)
    side.side.rank_lost(facts.RankLost(Rank(0)))
    assert side.side.take_results().failed == ["a"]


def test_a_reset_says_whether_copies_are_left() -> None:
    side = Side()
    plan = loading(side)
    assert side.side.reset() is False
    side.done(plan)
    assert side.side.reset() is True


def test_clocks_are_the_machines_by_default() -> None:
    side = SchedulerSide(SHAPE, OffloadConfig(), Pool(), clocks=None)
    assert side._clocks == Clocks()
    side.step(facts.StepScheduled(0))
    side.close()


# -- cost -------------------------------------------------------------------------------------------------------


def calls_of_a_step(side: Side) -> int:
    """Python and C calls of one step in which nothing happens."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        side.step()
    finally:
        sys.setprofile(None)
    return calls


def tracking(requests: int) -> Side:
    """A side with so many requests that run, some of them stored, and do nothing."""
    side = Side()
    for number in range(requests):
        side.seen(f"r{number}", prefix=f"{number % 5}-", blocks=2)
        side.allocated(f"r{number}", blocks=2)
    for _ in range(3):
        side.done(side.step(*((f"r{number}", 2 * BLOCK) for number in range(0, requests, 2))))
    return side


@pytest.mark.slow
def test_a_step_costs_the_same_however_many_requests_do_nothing_in_it() -> None:
    assert calls_of_a_step(tracking(10)) == calls_of_a_step(tracking(10_000))
