from __future__ import annotations

import pytest

from kvoffload.model.wire import Direction
from kvoffload.runtime.step_times import Copies, StepTimes

STORES, LOADS = (Direction.STORE,), (Direction.LOAD,)
BOTH = STORES + LOADS


def steps(times: StepTimes, seconds: float, copies: Copies = (), tokens: int = 4, count: int = 400) -> None:
    for _ in range(count):
        times.observe(seconds, tokens, copies)


def test_only_steps_of_similar_size_are_compared() -> None:
    times = StepTimes()
    steps(times, 0.010, tokens=4)
    steps(times, 0.040, tokens=64)
    steps(times, 0.012, STORES, tokens=5)
    assert times.usual_s(6) == pytest.approx(0.010)
    assert times.usual_s(100) == pytest.approx(0.040)
    assert times.slowdown(STORES) == pytest.approx(0.2, rel=0.01)
    assert times.slowdown(LOADS) == times.slowdown(BOTH) == 0


def test_a_step_size_that_never_ran_without_copies_has_no_estimate() -> None:
    times = StepTimes()
    steps(times, 0.010, LOADS)
    assert times.usual_s(4) == times.slowdown(LOADS) == 0


def test_faster_steps_during_copies_do_not_count_as_a_benefit() -> None:
    times = StepTimes()
    steps(times, 0.010)
    steps(times, 0.008, BOTH)
    assert times.slowdown(BOTH) == 0


def test_a_single_stall_changes_the_estimate_little() -> None:
    times = StepTimes()
    steps(times, 0.010)
    steps(times, 60.0, LOADS, count=1)
    assert times.slowdown(LOADS) <= 3 / 64
    steps(times, 60.0, count=1)
    assert times.usual_s(4) < 0.0125


def test_a_slow_first_step_is_soon_forgotten() -> None:
    times = StepTimes()
    steps(times, 3.0, count=1)
    steps(times, 0.010, count=1)
    assert times.usual_s(4) == 0.010


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_steps_scheduled_back_to_back_change_the_estimate_little(seconds: float) -> None:
    times = StepTimes()
    steps(times, 0.010)
    steps(times, seconds, count=1)
    assert times.usual_s(4) >= 0.0095


def test_steps_of_every_size_are_measured() -> None:
    times = StepTimes()
    steps(times, 0.010, tokens=1)
    steps(times, 0.020, tokens=1 << 40)
    assert times.usual_s(1) == pytest.approx(0.010)
    assert times.usual_s(1 << 40) == pytest.approx(0.020)
