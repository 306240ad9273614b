from __future__ import annotations

from kvoffload.model.events import Event, ResetEnded, ResetStarted
from kvoffload.model.ids import RequestId
from tests.runtime.parts import RELOAD, TIMEOUT_S, Side, loading, storing


def received(side: Side) -> list[Event]:
    found: list[Event] = []
    for cls in (ResetStarted, ResetEnded):
        side.side.bus.count(cls, found.append)
    return found


def draining(side: Side) -> float:
    return side.gauge("reset_draining_jobs")


def test_a_reset_ends_when_the_last_copy_has() -> None:
    side = Side()
    reported = received(side)
    load = loading(side)
    assert side.side.reset() is False
    assert reported == [ResetStarted(1, 3, 3, 1)]
    assert draining(side) == 1
    assert side.side.reset() is False
    side.done(load)
    assert reported[1:] == [ResetStarted(2, 0, 3, 1), ResetEnded(2, 0)]
    assert draining(side) == 0
    side.stored("q")
    assert side.side.reset() is True
    assert reported[3:] == [ResetStarted(3, 3, 0, 0), ResetEnded(3, 0)]


def test_a_reset_is_complete_although_a_store_of_older_blocks_runs() -> None:
    """vLLM resets the connector before it sleeps, and fails to sleep if the answer is False."""
    side = Side()
    store = storing(side)
    assert side.side.reset() is True
    assert draining(side) == 1
    side.done(store)
    assert draining(side) == 0
    assert side.side.lookup(side.seen("again", "s"), 0) == 0


def test_a_reset_is_not_complete_before_a_planned_load_has_ended() -> None:
    side = Side()
    side.stored()
    side.seen("a")
    assert side.side.lookup(RequestId("a"), 0) == RELOAD
    side.allocated("a", RELOAD)
    assert side.side.reset() is False
    side.done(side.step())
    assert side.side.reset() is True


def test_a_reset_does_not_wait_for_later_copies() -> None:
    side = Side()
    load = loading(side)
    side.side.reset()
    reported = received(side)
    storing(side)
    side.done(load)
    assert reported == [ResetEnded(1, 0)]
    assert draining(side) == 0


def test_a_reset_does_not_wait_for_an_abandoned_copy() -> None:
    side = Side()
    loading(side)
    reported = received(side)
    assert side.side.reset() is False
    side.clock.jump(TIMEOUT_S)
    side.step()
    assert reported[-1] == ResetEnded(1, 1)
    assert draining(side) == 0
    assert side.side.reset() is True
