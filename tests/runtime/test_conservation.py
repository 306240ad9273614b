from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.causes import DegradeCause
from kvoffload.model.ids import DeviceBlockId
from tests.runtime.parts import RELOAD, TIMEOUT_S, Pool, Side, loading


def audits(side: Side) -> int:
    return side.side.counters.snapshot().total("kvoffload_audits_total")


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    lines = [getattr(record, "kvoffload", {}) for record in caplog.records]
    return [line for line in lines if line.get("event") == event]


# -- when -----------------------------------------------------------------------------------------------------------------


def test_the_end_of_the_last_request_is_audited_and_steps_are_not() -> None:
    side = Side()
    before = audits(side)
    for _ in range(3):
        side.step()
    assert audits(side) == before
    plan = loading(side)
    assert audits(side) == before + 1
    side.done(plan)
    assert audits(side) == before + 1
    side.ended("a")
    assert audits(side) == before + 2


def test_the_audit_waits_for_copies_that_outlast_the_last_request() -> None:
    side = Side()
    plan = loading(side)
    before = audits(side)
    side.ended("a")
    assert audits(side) == before
    side.done(plan)
    assert audits(side) == before + 1


def test_a_problem_found_at_rest_switches_offloading_off_at_once(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    side.stored()
    side.side.core.state.pool._counts[SlotState.EMPTY] -= 1
    side.seen("a")
    assert side.side.degraded is None
    side.ended("a")
    assert side.side.degraded is DegradeCause.INVARIANT_BROKEN
    (line,) = logged(caplog, "offloading_off")
    assert "slots in all states: 49 counted" in str(line["detail"])
    before = audits(side)
    side.seen("b")
    side.ended("b")
    assert audits(side) == before  # no second audit runs at rest


def test_an_audit_that_raises_switches_only_offloading_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side()
    monkeypatch.setattr(side.side.core.state.pool, "pins", None)
    side.seen("a")
    side.ended("a")
    assert side.side.degraded is DegradeCause.HANDLER_RAISED


# -- the engine's own counts ------------------------------------------------------------------------------------------------


class Readable(Pool):
    """A pool whose reference counts can be read."""

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        if sorted(self.leased) == sorted(block for block, count in leases.items() for _ in range(count)):
            return []
        return ["the engine counts others"]


@pytest.mark.parametrize("asked", [False, True])
def test_the_audit_compares_the_engines_reference_counts(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# -- the oldest job -----------------------------------------------------------------------------------------


def test_the_oldest_job_is_reported_while_there_is_one() -> None:
    side = Side()
    assert side.side.gauges()["kvoffload_oldest_job_timestamp_seconds"][()] == 0
    first = side.clock.monotonic()
    load = loading(side)
    side.clock.jump(5)
    side.seen("b", prefix="q")
    side.allocated("b")
    side.name_blocks("q")
    store = side.step(("b", RELOAD))
    assert store.stores
    assert side.side.gauges()["kvoffload_oldest_job_timestamp_seconds"][()] == first
    side.done(load)
    assert side.side.gauges()["kvoffload_oldest_job_timestamp_seconds"][()] == first + 5
    side.done(store)
    assert side.side.gauges()["kvoffload_oldest_job_timestamp_seconds"][()] == 0


def test_an_abandoned_job_is_not_the_oldest() -> None:
    side = Side()
    loading(side)
    side.clock.jump(TIMEOUT_S)
    side.step()
    assert side.side.gauges()["kvoffload_oldest_job_timestamp_seconds"][()] == 0
