from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause
from kvoffload.model.ids import DeviceBlockId, RequestId
from kvoffload.model.wire import NOTHING
from kvoffload.runtime.copies import LoadAnswers
from tests.conservation import conservation
from tests.operations import replace_handler
from tests.runtime.parts import RELOAD, TIMEOUT_S, Side, loading


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
    assert side.side.counters.snapshot().total("kvoffload_lookup_blocks_total") == 0


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


def test_a_plan_that_raises_is_empty_and_leaves_no_request_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    side.stored()
    side.seen("a")
    side.side.lookup(RequestId("a"), 0)
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


def test_a_load_that_the_core_lost_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.stored()
    side.seen("a")
    side.side.lookup(RequestId("a"), 0)
    monkeypatch.setattr(side.side.core._loads, "_plan", boom)
    side.allocated("a", RELOAD)
    assert side.side.has_work
    assert side.side.take_answers().failed == ["a"]
    assert not side.side.has_work


def test_open_loads_fail_without_observers_on_the_bus() -> None:
    side = Side()
    plan = loading(side)
    bus = side.side.bus
    for cls, handler in bus._handlers.items():
        bus._routes[cls] = [handler]
    replace_handler(side.side.bus, facts.StepScheduled, boom)
    side.step()
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert side.side.take_answers().failed == ["a"]
    assert side.pool.leased
    side.done(plan)
    assert not side.pool.leased
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
    side.seen("a")
    side.allocated("a")
    side.name_blocks("p")
    plan = side.step(("a", RELOAD))
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


def test_after_an_error_hanging_copies_have_the_usual_timeout_and_may_end_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side()
    plan = loading(side)
    monkeypatch.setattr(side.side.core.state.jobs, "time_out", boom)
    side.clock.jump(TIMEOUT_S)
    assert side.side.has_work
    side.step()
    assert side.side.take_answers().failed == ["a"]
    assert not side.side.has_work
    assert side.pool.leased
    assert side.done(plan) == ([], [])
    assert not side.pool.leased


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
    counts = side.side.counters.snapshot()
    assert counts.count("kvoffload_load_blocks_total", "failed") == 3
    assert conservation(counts, drained=True) == []
    assert side.side.lookup(RequestId("c"), 0) == 0
    assert side.done(plan) == ([], [RequestId("a")])
    assert not side.pool.leased


def test_reading_metrics_that_raise_returns_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    plan = loading(side)
    monkeypatch.setattr(side.side.core.state.pool, "count", boom)
    assert side.side.gauges() == {"kvoffload_degraded": {("handler_raised",): 1}}
    assert side.pool.leased
    side.step()
    assert side.side.take_answers().failed == ["a"]
    assert side.done(plan) == ([], [])
    assert not side.pool.leased


def test_an_audit_that_finds_a_problem_switches_offloading_off() -> None:
    side = Side()
    assert side.side.audit() == []
    side.side.core.state.pool._counts[SlotState.EMPTY] -= 1
    assert side.side.audit()
    assert side.side.degraded is DegradeCause.INVARIANT_BROKEN
    off = {labels for labels, is_off in side.side.gauges()["kvoffload_degraded"].items() if is_off}
    assert off == {("invariant_broken",)}
