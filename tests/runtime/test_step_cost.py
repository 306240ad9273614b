"""The cost of a step, in calls instead of time."""

from __future__ import annotations

import pytest

from kvoffload.model.wire import NOTHING
from tests.operations import calls
from tests.runtime.parts import BLOCK, Side


def tracking(requests: int) -> Side:
    """Return a side with this many running requests, some of them stored, that do nothing."""
    side = Side()
    for number in range(requests):
        side.seen(f"r{number}", prefix=f"{number % 5}-", blocks=2)
        side.allocated(f"r{number}", blocks=2)
    for _ in range(3):
        side.done(side.step(*((f"r{number}", 2 * BLOCK) for number in range(0, requests, 2))))
    return side


@pytest.mark.slow
def test_a_step_costs_the_same_however_many_requests_do_nothing_in_it() -> None:
    assert calls(tracking(10).step) == calls(tracking(10_000).step)


def test_a_step_without_a_planned_job_asks_for_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With cold caches every call matters: a call for the plan made an empty step a fifth longer."""
    side = tracking(3)

    def asked(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(side.side.core, "plan", asked)
    monkeypatch.setattr(side.side.copies, "overdue", asked)
    assert side.step() == NOTHING
    assert side.side.degraded is None
