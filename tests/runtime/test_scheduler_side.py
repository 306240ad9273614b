from __future__ import annotations

from collections import Counter

import pytest

from kvoffload.core.machine import JobState
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, EvictionCause
from kvoffload.model.events import BlocksEvicted, Event
from kvoffload.model.ids import BlockKey, Rank, RequestId
from kvoffload.model.wire import Direction, JobReport, TransferReport
from kvoffload.runtime.copies import NO_ANSWERS, LoadAnswers
from tests.conservation import conservation, slot_problems
from tests.core.audit import audit_side
from tests.runtime.parts import RELOAD, TIMEOUT_S, Side, loading, storing

# -- deadlines --------------------------------------------------------------------------------------------------


def test_a_job_is_abandoned_after_its_time_and_not_before() -> None:
    side = Side()
    side.done(loading(side))
    side.ended("a")
    jobs = side.side.core.state.jobs
    loading(side, "b")
    side.clock.jump(TIMEOUT_S - 0.1)
    side.step()
    assert jobs.count(Direction.LOAD, JobState.SUBMITTED) == 1
    side.clock.jump(0.1)
    side.step()
    assert jobs.count(Direction.LOAD, JobState.ABANDONED) == 1
    assert side.side.take_answers().failed == ["b"]
    assert not side.side.has_work
    # the first load had ended, so it is not overdue
    assert side.counts.by_label("kvoffload_load_blocks_total") == {"loaded": 3, "abandoned": 3}
    assert audit_side(side.side) == []


def test_an_engine_keeps_stepping_until_it_has_taken_the_answer_of_a_load() -> None:
    side = Side()
    (load,) = loading(side).loads
    done = JobReport(load.id, load.direction, CopyOutcome.DONE, 64, 0.0, 0.0)
    side.side.reported([TransferReport(Rank(0), (done,), 8)])
    side.side.ended(facts.RequestEnded(RequestId("a"), 0, ((),), holds_blocks=False))
    assert side.side.has_work
    assert side.side.take_answers() == LoadAnswers(loaded=[RequestId("a")])
    assert not side.side.has_work
    assert side.side.take_answers() is NO_ANSWERS


def test_a_lookup_waits_for_another_requests_load_until_the_time_limit() -> None:
    side = Side()
    loading(side)
    other, gone = side.seen("b"), side.seen("gone")
    for request in (other, gone):
        assert side.side.lookup(request, 0) is None
    side.ended("gone")
    side.clock.jump(TIMEOUT_S - 0.1)
    assert side.side.lookup(other, 0) is None
    side.clock.jump(0.1)
    assert side.side.lookup(other, 0) == RELOAD
    side.allocated("b", RELOAD)
    side.done(side.step())
    side.step(("b", RELOAD), preempted=["b"])
    assert not side.side._deferred


# -- gauges -----------------------------------------------------------------------------------------------------


def test_the_oldest_pin_is_reported_while_there_is_one() -> None:
    def oldest() -> float:
        return side.gauge("oldest_pin_timestamp_seconds")

    side = Side()
    side.stored()
    requests = [side.seen(name) for name in "abc"]
    assert oldest() == 0
    first = side.clock.monotonic() + 5
    for request in requests:
        side.clock.jump(5)
        side.side.lookup(request, 0)
    assert oldest() == first
    side.allocated("a", RELOAD)  # the load's pins have the age of the lookup's pins
    plan = side.step()
    side.ended("c")
    assert oldest() == first
    side.done(plan)
    assert oldest() == first + 5
    side.ended("b")
    assert oldest() == 0
    assert audit_side(side.side) == []


def test_the_oldest_job_is_reported_while_there_is_one() -> None:
    def oldest() -> float:
        return side.gauge("oldest_job_timestamp_seconds")

    side = Side()
    assert oldest() == 0
    first = side.clock.monotonic()
    load = loading(side)
    side.clock.jump(5)
    store = storing(side)
    assert oldest() == first
    side.done(load)
    assert oldest() == first + 5
    side.done(store)
    assert oldest() == 0
    storing(side, "hangs", "h")
    side.clock.jump(TIMEOUT_S)
    side.step()
    assert oldest() == 0  # an abandoned job does not count


def test_gauges_follow_slots_and_jobs() -> None:
    side = Side(slots=7)
    loading(side)
    now = side.side.gauges()
    assert slot_problems(now) == []
    assert now["kvoffload_capacity_slots"]["host",] == 7
    assert [now["kvoffload_slots"]["host", state] for state in ("pinned", "empty")] == [3, 4]
    assert now["kvoffload_open_jobs"]["host", "load", "submitted"] == 1
    assert not any(now["kvoffload_degraded"].values())
    side.clock.jump(TIMEOUT_S)
    side.step()
    assert side.gauge("slots", "host", "quarantined") == 3
    assert side.gauge("open_jobs", "host", "load", "abandoned") == 1


def test_an_eviction_reports_its_most_recent_blocks_age_and_a_hit_its_length() -> None:
    side = Side(slots=6)
    side.stored("p")
    side.clock.jump(20.0)
    side.step()
    side.stored("q")
    side.side.bus.publish(BlocksEvicted(3, EvictionCause.CORRUPT, 0.0))  # this removal has no age
    side.clock.jump(70.0)
    side.step()
    side.stored("r", blocks=4)  # this evicts all blocks of p, and one block of q
    ages = side.counts.distributions["kvoffload_eviction_age_seconds"][()]
    assert (ages.samples, ages.total) == (1, 70.0)
    assert side.counts.count("kvoffload_evicted_blocks_total", "host", "space") == 4
    loading(side, "a")
    hits = side.counts.distributions["kvoffload_hit_tokens"][()]
    assert (hits.samples, hits.total) == (1, RELOAD)


@pytest.mark.parametrize(
    ("reports", "least"),
    [
        ([], 1.0),
        ([(2, 0.5)], 1.0),
        ([(0, 0.5), (1, 1.0)], 0.5),
        ([(0, 0.5), (1, 0.25), (1, 1.0)], 0.5),
        ([(0, 0.5), (1, 0.25), (1, 0.25), (0, 1.0)], 0.25),
    ],
)
def test_the_limit_on_stores_is_the_lowest_that_a_rank_reported_last(
    reports: list[tuple[int, float]], least: float
) -> None:
    side = Side(ranks=2)
    for rank, share in reports:
        side.side.reported([TransferReport(Rank(rank), (), 8, share)])
    assert side.side.gauges()["kvoffload_store_bound_ratio"] == {(): least}


def test_the_bytes_of_all_ranks_are_summed_while_memory_becomes_ready() -> None:
    def report(rank: int, ready: int, *, is_growing: bool) -> None:
        fact = TransferReport(Rank(rank), (), ready, is_growing=is_growing, slot_bytes=100, wanted_slots=10)
        side.side.reported([fact])

    def host_bytes() -> list[float]:
        return [side.gauge("host_bytes", what) for what in ("wanted", "reserved", "used")]

    side = Side(ranks=2, slots=0)
    assert host_bytes() == [0, 0, 0]
    report(0, 2, is_growing=True)
    report(1, 3, is_growing=True)
    assert host_bytes() == [2000, 500, 0]
    report(0, 10, is_growing=False)
    report(1, 10, is_growing=False)
    side.side.core.state.pool.reserve([BlockKey(bytes([number])) for number in range(3)])
    assert host_bytes() == [2000, 2000, 3 * 200]


def test_the_info_metric_has_versions_and_settings() -> None:
    side = Side(verify="sample", min_load_tokens="auto")
    ((labels, number),) = side.side.gauges()["kvoffload_info"].items()
    assert number == 1
    assert labels[1:] == ("unknown", "unknown", "eager", "sample", "auto", "1")


# -- hook times -------------------------------------------------------------------------------------------------


def hook_samples(side: Side) -> Counter[str]:
    side.side.bus.tick()  # counts the hooks of all steps
    series = side.counts.distributions["kvoffload_hook_seconds"]
    return Counter({hook: one.samples for (hook,), one in series.items()})


def test_each_hook_adds_one_sample_per_step() -> None:
    side = Side()
    side.stored()
    before = hook_samples(side)
    for name in ("a", "b"):
        side.seen(name)
    for _ in range(3):
        side.side.lookup(RequestId("a"), 0)
    side.allocated("a", RELOAD)
    side.step()
    once = {"seen": 1, "lookup": 1, "allocated": 1, "step": 1}
    assert hook_samples(side) - before == once
    side.side.reset()
    side.step()
    assert hook_samples(side) - before == {**once, "step": 2, "reset": 1}


def test_a_hooks_time_includes_all_its_calls_even_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.seen("a")

    def slow(*_: object, **__: object) -> None:
        side.clock.jump(2)
        raise ZeroDivisionError

    monkeypatch.setattr(side.side.core, "lookup", slow)
    for _ in range(2):
        assert side.side.lookup(RequestId("a"), 0) == 0
    for fact in (facts.RequestSeen, facts.RequestEnded, facts.TransferReported):
        side.side.bus.count(fact, lambda _: side.clock.jump(3))
    side.ended(side.seen("b"))
    side.report()
    side.step()
    side.side.bus.tick()
    series = side.counts.distributions["kvoffload_hook_seconds"]
    spent = {hook: series[hook,].total for hook in ("seen", "ended", "lookup", "report")}
    assert spent == {"seen": 3, "ended": 3, "lookup": 2, "report": 3}


# -- events -----------------------------------------------------------------------------------------------------


def test_events_follow_their_fact_in_order() -> None:
    side = Side()
    received: list[str] = []
    for cls in (*facts.Fact.__subclasses__(), *Event.__subclasses__()):
        side.side.bus.count(cls, lambda message: received.append(type(message).__name__))
    side.done(loading(side))
    side.ended("a")
    assert received == [
        *("RequestSeen", "BlocksAllocated"),
        *("StepScheduled", "StoreScheduled", "BlocksOffered"),
        *("TransferReported", "RankReported", "StoreEnded"),
        *("RequestEnded", "RequestsEnded", "StepScheduled"),
        *("RequestSeen", "HitPinned", "BlocksAllocated", "LookupAnswered", "LoadScheduled", "StepScheduled"),
        *("TransferReported", "RankReported", "LoadEnded", "RequestEnded", "RequestsEnded"),
    ]
    assert conservation(side.counts, drained=True) == []
