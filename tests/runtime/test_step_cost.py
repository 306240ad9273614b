"""What a step costs, in calls and not in time."""

from __future__ import annotations

import pytest

from tests.operations import calls
from tests.runtime.parts import BLOCK, Side


def tracking(requests: int) -> Side:
    """A side with so many requests that run, some of them stored, and do nothing."""
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
