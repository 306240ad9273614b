from __future__ import annotations

from kvoffload.model.events import Event, ResetEnded, ResetStarted
from tests.runtime.parts import TIMEOUT_S, Side, loading, storing


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
