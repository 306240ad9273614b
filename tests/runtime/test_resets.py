from __future__ import annotations

import random

import pytest

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


@pytest.mark.parametrize("seed", range(5))
def test_a_resets_answer_metric_and_log_always_agree(seed: int) -> None:
    choose = random.Random(seed)
    side = Side(slots=20)
    reported = received(side)
    plans, open_requests = [], list[str]()
    for number in range(120):
        name = f"r{number}"
        side.seen(name, prefix=f"p{number % 3}-")
        found = side.side.lookup(RequestId(name), 0)
        side.allocated(name, found or 0)
        open_requests.append(name)
        side.name_blocks(f"p{number % 3}-")
        plans.append(side.step((name, RELOAD)))
        while plans and choose.random() < 0.5:
            side.done(plans.pop(choose.randrange(len(plans))))
        while open_requests and choose.random() < 0.4:
            side.ended(open_requests.pop(0))
        if choose.random() < 0.1:
            side.clock.jump(TIMEOUT_S / 2)
        if choose.random() < 0.3:
            answer = side.side.reset()
            started = [event for event in reported if isinstance(event, ResetStarted)][-1]
            assert answer is (started.open_jobs == 0) is (draining(side) == 0)
            assert isinstance(reported[-1], ResetEnded) is answer
            assert not side.side.core.state.pool.index
    assert any(isinstance(event, ResetStarted) and event.open_jobs for event in reported)
    assert any(isinstance(event, ResetEnded) for event in reported)
