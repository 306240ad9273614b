from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause
from kvoffload.model.ids import DeviceBlockId, RequestId
from kvoffload.model.wire import NOTHING
from kvoffload.runtime.copies import LoadAnswers
from tests.conservation import conservation
from tests.operations import replace_handler
from tests.runtime.parts import RELOAD, TIMEOUT_S, Pool, Side, loading, storing

# -- a core that raises -----------------------------------------------------------------------------------------


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def found() -> Side:
    """Return a side on which a request has found blocks, but has not been allocated."""
    side = Side()
    side.stored()
    assert side.side.lookup(side.seen("a"), 0) == RELOAD
    return side


def test_switching_off_is_logged_once_with_the_last_journal_lines(caplog: pytest.LogCaptureFixture) -> None:
    side = found()
    assert side.gauge("oldest_pin_timestamp_seconds")
    replace_handler(side.side.core, facts.StepScheduled, boom)
    side.step()
    side.step()
    raised, off = [record.kvoffload for record in caplog.records]  # type: ignore[attr-defined]
    assert (raised["event"], raised["doing"]) == ("core_raised", "StepScheduled")
    assert (off["event"], off["cause"]) == ("offloading_off", "handler_raised")
    assert "StepScheduled" in off["journal"][-3]
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert not side.gauge("oldest_pin_timestamp_seconds")  # hits that were never loaded are forgotten


@pytest.mark.parametrize("question", ["lookup", "take_results"])
def test_a_query_that_raises_returns_its_default(
    question: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = found()
    side.side.core.state.results.loaded.append(RequestId("b"))
    monkeypatch.setattr(side.side.core, question, boom)
    assert side.side.lookup(RequestId("a"), 0) == (0 if question == "lookup" else RELOAD)
    assert side.step() == NOTHING
    assert side.side.take_answers() == LoadAnswers()
    assert side.side.degraded is DegradeCause.HANDLER_RAISED
    assert f"doing={question}" in caplog.text


def test_a_plan_that_raises_is_empty_and_leaves_no_request_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = found()
    side.allocated("a", RELOAD)
    monkeypatch.setattr(side.side.core.state.jobs, "submit", boom)
    assert side.step() == NOTHING
    assert "doing=plan" in caplog.text
    assert side.side.take_answers().failed == ["a"]
    assert side.side.take_answers() == LoadAnswers()
    assert not side.side.has_work
    assert not side.pool.leased


def test_r5_leases_of_a_job_that_was_never_submitted_end(monkeypatch: pytest.MonkeyPatch) -> None:
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
    replace_handler(side.side.core, facts.StepScheduled, boom)


def the_handler_of_steps_without_observers(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.side.bus._routes.clear()
    replace_handler(side.side.core, facts.StepScheduled, boom)


def the_timeout_of_a_job(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side.side.core.state.jobs, "time_out", boom)
    side.clock.jump(TIMEOUT_S)
    assert side.side.has_work


@pytest.mark.parametrize(
    "raises",
    [the_handler_of_steps, the_handler_of_steps_without_observers, the_timeout_of_a_job],
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


def test_a_load_is_answered_once_even_if_the_core_repeats_its_answer() -> None:
    side = Side()
    plan = loading(side)
    side.side.core.state.results.failed.append(RequestId("a"))
    assert side.side.take_answers().failed == ["a"]
    assert side.done(plan) == ([], [])


def test_blocks_under_copies_that_the_core_lost_stay_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(ranks=2)
    plan = storing(side)
    monkeypatch.setattr(side.side.core.stores, "reported", boom)
    side.done(plan, rank=0)
    side.done(plan, rank=0)
    assert side.side.has_work
    assert side.pool.leased == list(side.last_table)
    side.done(plan, rank=1)
    assert not side.pool.leased
    assert not side.side.has_work
    (problem,) = side.side.audit()
    assert "boom" in problem


def test_after_the_core_raised_it_receives_no_facts_and_open_loads_fail() -> None:
    side = Side()
    plan = loading(side)
    given: list[object] = []

    def raising(fact: facts.RequestSeen, *_: object) -> None:
        given.append(fact)
        boom()

    replace_handler(side.side.core, facts.RequestSeen, raising)
    side.seen("b")
    side.seen("c")
    assert len(given) == 1
    assert side.counts.count("kvoffload_load_blocks_total", "failed") == 3
    assert conservation(side.counts, drained=True) == []
    assert side.side.lookup(RequestId("c"), 0) == 0
    assert side.done(plan) == ([], [RequestId("a")])
    assert not side.pool.leased


# -- audits -----------------------------------------------------------------------------------------------------


def audits(side: Side) -> float:
    return side.gauge("audits_total")


def test_the_end_of_the_last_request_and_copy_is_audited_and_steps_are_not() -> None:
    side = Side()
    before = audits(side)
    for _ in range(3):
        side.step()
    assert audits(side) == before
    plan = loading(side)
    assert audits(side) == before + 1  # `loading` has stored blocks for a request that has ended
    side.done(plan)
    assert audits(side) == before + 1
    side.ended("a")
    assert audits(side) == before + 2
    plan = storing(side)
    side.ended("s")
    assert audits(side) == before + 2
    side.done(plan)
    assert audits(side) == before + 3


@pytest.mark.parametrize("when", ["at rest", "asked"])
def test_an_audit_that_finds_a_problem_switches_offloading_off_at_once(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    side.stored()
    assert side.side.audit() == []
    side.side.core.state.pool._counts[SlotState.EMPTY] -= 1
    side.seen("a")
    assert side.side.degraded is None
    if when == "asked":
        assert side.side.audit()
    side.ended("a")
    assert side.side.degraded is DegradeCause.INVARIANT_BROKEN
    off = {labels for labels, is_off in side.side.gauges()["kvoffload_degraded"].items() if is_off}
    assert off == {("invariant_broken",)}
    assert caplog.text.count("offloading_off") == 1
    assert "slots in all states: 49 counted" in caplog.text
    before = audits(side)
    side.ended(side.seen("b"))
    assert audits(side) == before  # no second audit runs at rest


def test_an_audit_that_raises_switches_only_offloading_off(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    monkeypatch.setattr(side.side.core.state.pool, "pins", None)
    side.ended(side.seen("a"))
    assert side.side.degraded is DegradeCause.HANDLER_RAISED


class Readable(Pool):
    """A pool whose reference counts can be read."""

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        expected = sorted(block for block, count in leases.items() for _ in range(count))
        return [] if sorted(self.leased) == expected else ["the engine counts others"]


@pytest.mark.parametrize("asked", [False, True])
def test_audits_compare_the_engines_reference_counts(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.parts.Pool", Readable)
    side = Side()
    plan = loading(side)
    assert side.side.audit() == []
    block = side.pool.leased.pop()
    if asked:
        assert side.side.audit() == ["the engine counts others"]
    else:
        side.pool.leased += [block, block]  # This adds a lease that is never released.
        side.done(plan)
        side.ended("a")
    assert side.side.degraded is DegradeCause.INVARIANT_BROKEN
