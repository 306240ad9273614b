"""If our own code raises, offloading is switched off, one line is logged, and no request waits for us (R12)."""

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


def test_switching_off_is_logged_once_with_the_journals_tail(caplog: pytest.LogCaptureFixture) -> None:
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
def test_a_question_that_raises_is_answered_with_nothing(
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


def test_a_plan_that_raises_is_empty_and_leaves_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planning raises after the load was planned, so no worker will ever report the load."""
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


def test_r5_blocks_leased_for_a_job_that_never_came_to_be_are_released(
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


def test_a_load_that_the_core_forgot_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.stored()
    side.seen("a")
    side.side.lookup(RequestId("a"), 0)
    monkeypatch.setattr(side.side.core._loads, "_plan", boom)
    side.allocated("a", RELOAD)
    assert side.side.has_work
    assert side.side.take_answers().failed == ["a"]
    assert not side.side.has_work


def test_loads_fail_though_nothing_watches_the_bus() -> None:
    """Observers that raise are removed. The engine's loads must be answered without observers."""
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


def test_a_load_is_answered_once_though_the_core_comes_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    plan = loading(side)
    side.side.core.state.results.failed.append(RequestId("a"))
    assert side.side.take_answers().failed == ["a"]
    assert side.done(plan) == ([], [])


def test_blocks_stay_leased_while_a_worker_copies_though_the_core_lost_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The core raises on the first of two reports, so only the second report is still missing."""
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


def test_copies_that_hang_are_waited_for_no_longer_than_ever_and_may_end_late(
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


def test_a_core_that_raised_gets_no_more_facts_and_open_loads_fail() -> None:
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


def test_numbers_that_cannot_be_read_do_not_stop_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may read the gauges in a step, and another thread may read them at any time.

    A failed read must not stop the use of the core before the next step.
    """
    side = Side()
    plan = loading(side)
    monkeypatch.setattr(side.side.core.state.pool, "count", boom)
    assert side.side.gauges() == {"kvoffload_degraded": {("handler_raised",): 1}}
    assert side.pool.leased
    side.step()
    assert side.side.take_answers().failed == ["a"]
    assert side.done(plan) == ([], [])
    assert not side.pool.leased


def test_an_audit_that_finds_something_switches_offloading_off() -> None:
    side = Side()
    assert side.side.audit() == []
    side.side.core.state.pool._counts[SlotState.EMPTY] -= 1
    assert side.side.audit()
    assert side.side.degraded is DegradeCause.INVARIANT_BROKEN
    off = {labels for labels, is_off in side.side.gauges()["kvoffload_degraded"].items() if is_off}
    assert off == {("invariant_broken",)}
