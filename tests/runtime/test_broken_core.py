from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause
from kvoffload.model.ids import DeviceBlockId, RequestId
from kvoffload.model.wire import NOTHING
from kvoffload.runtime.copies import LoadAnswers
from tests.conservation import conservation
from tests.operations import replace_handler
from tests.runtime.parts import RELOAD, TIMEOUT_S, Side, loading, storing


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def test_switching_offloading_off_logs_one_line_with_the_last_journal_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = Side()
    replace_handler(side.side.bus, facts.StepScheduled, boom)
    side.step()
    side.step()
    said = [record.kvoffload for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["event"] for line in said] == ["core_raised", "offloading_off"]
    assert said[0]["doing"] == "StepScheduled"
    assert said[1]["cause"] == DegradeCause.HANDLER_RAISED.value
    assert "StepScheduled" in said[1]["journal"][-3]
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert side.counts.total("kvoffload_lookup_blocks_total") == 0


@pytest.mark.parametrize("question", ["lookup", "take_results"])
def test_a_query_that_raises_returns_its_default(
    question: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    side.stored()
    side.seen("a")
    side.side.core.state.results.loaded.append(RequestId("b"))
    monkeypatch.setattr(side.side.core, question, boom)
    assert side.side.lookup(RequestId("a"), 0) in (0, RELOAD)
    assert side.step() == NOTHING
    assert side.side.take_answers() == LoadAnswers()
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert f"doing={question}" in caplog.text


def found() -> Side:
    """Return a side on which a request has found blocks, but has not been allocated."""
    side = Side()
    side.stored()
    assert side.side.lookup(side.seen("a"), 0) == RELOAD
    return side


def test_the_core_forgets_hits_that_were_never_loaded_when_offloading_is_switched_off() -> None:
    side = found()
    assert side.side.copies.by_request
    replace_handler(side.side.bus, facts.StepScheduled, boom)
    side.step()
    assert not side.side.copies.by_request


def test_a_plan_that_raises_is_empty_and_leaves_no_request_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = found()
    side.allocated("a", RELOAD)
    monkeypatch.setattr(side.side.core.state.jobs, "submit", boom)
    assert side.step() == NOTHING
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert "doing=plan" in caplog.text
    assert side.side.take_answers().failed == ["a"]
    assert side.side.take_answers() == LoadAnswers()
    assert not side.side.has_work
    assert not side.pool.leased


def test_r5_blocks_leased_for_a_job_that_was_never_submitted_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side()
    side.seen("a")
    side.allocated("a")
    side.name_blocks("p")
    leases = side.side.core.state.leases
    take = leases.take

    def take_and_raise(blocks: Sequence[DeviceBlockId]) -> None:
        take(blocks)
        boom()

    monkeypatch.setattr(leases, "take", take_and_raise)
    side.step(("a", RELOAD))
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert not side.pool.leased


def the_handler_of_steps(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_handler(side.side.bus, facts.StepScheduled, boom)


def it_without_observers(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = side.side.bus
    for cls, handler in bus._handlers.items():
        bus._routes[cls] = [handler]
    replace_handler(bus, facts.StepScheduled, boom)


def the_timeout_of_a_job(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side.side.core.state.jobs, "time_out", boom)
    side.clock.jump(TIMEOUT_S)
    assert side.side.has_work


def reading_metrics(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side.side.core.state.pool, "count", boom)
    assert side.side.gauges() == {"kvoffload_degraded": {("handler_raised",): 1}}


@pytest.mark.parametrize(
    "raises", [the_handler_of_steps, it_without_observers, the_timeout_of_a_job, reading_metrics]
)
def test_whatever_raises_an_open_load_fails_and_its_blocks_stay_leased_until_its_copy_has_ended(
    raises: Callable[[Side, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Side()
    plan = loading(side)
    raises(side, monkeypatch)
    side.step()
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert side.side.take_answers().failed == ["a"]
    assert side.pool.leased
    assert side.done(plan) == ([], [])
    assert not side.pool.leased
    assert not side.side.has_work


def test_a_load_that_the_core_lost_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    side = found()
    monkeypatch.setattr(side.side.core._loads, "_plan", boom)
    side.allocated("a", RELOAD)
    assert side.side.has_work
    assert side.side.take_answers().failed == ["a"]
    assert not side.side.has_work


def test_a_load_is_answered_once_even_if_the_core_repeats_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    plan = loading(side)
    side.side.core.state.results.failed.append(RequestId("a"))
    assert side.side.take_answers().failed == ["a"]
    assert side.done(plan) == ([], [])


def test_blocks_stay_leased_during_copies_that_the_core_no_longer_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side(ranks=2)
    plan = storing(side)
    monkeypatch.setattr(side.side.core.stores, "reported", boom)
    side.done(plan, rank=0)
    side.done(plan, rank=0)
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert side.side.has_work
    assert side.pool.leased == list(side.last_table)
    side.done(plan, rank=1)
    assert not side.pool.leased
    assert not side.side.has_work
    assert len(side.side.audit()) == 1
    assert "boom" in side.side.audit()[0]


def test_after_the_core_raised_it_receives_no_facts_and_open_loads_fail() -> None:
    side = Side()
    plan = loading(side)
    given: list[object] = []

    def raising(fact: facts.RequestSeen) -> None:
        given.append(fact)
        boom()

    replace_handler(side.side.bus, facts.RequestSeen, raising)
    side.seen("b")
    side.seen("c")
    assert len(given) == 1
    counts = side.counts
    assert counts.count("kvoffload_load_blocks_total", "failed") == 3
    assert conservation(counts, drained=True) == []
    assert side.side.lookup(RequestId("c"), 0) == 0
    assert side.done(plan) == ([], [RequestId("a")])
    assert not side.pool.leased


def test_an_audit_that_finds_a_problem_switches_offloading_off() -> None:
    side = Side()
    assert side.side.audit() == []
    side.side.core.state.pool._counts[SlotState.EMPTY] -= 1
    assert side.side.audit()
    assert side.side.degraded is DegradeCause.INVARIANT_BROKEN
    off = {labels for labels, is_off in side.side.gauges()["kvoffload_degraded"].items() if is_off}
    assert off == {("invariant_broken",)}
