from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.causes import DegradeCause
from kvoffload.model.ids import DeviceBlockId
from tests.runtime.parts import TIMEOUT_S, Pool, Side, loading, storing


def audits(side: Side) -> int:
    return side.counts.total("kvoffload_audits_total")


# -- when -----------------------------------------------------------------------------------------------------------------


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


def test_a_problem_found_at_rest_switches_offloading_off_at_once(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    side.stored()
    side.side.core.state.pool._counts[SlotState.EMPTY] -= 1
    side.seen("a")
    assert side.side.degraded is None
    side.ended("a")
    assert side.side.degraded is DegradeCause.INVARIANT_BROKEN
    assert caplog.text.count("offloading_off") == 1
    assert "slots in all states: 49 counted" in caplog.text
    before = audits(side)
    side.seen("b")
    side.ended("b")
    assert audits(side) == before  # no second audit runs at rest


def test_an_audit_that_raises_switches_only_offloading_off(monkeypatch: pytest.MonkeyPatch) -> None:
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
