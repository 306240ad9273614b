from __future__ import annotations

import pytest

from kvoffload.runtime.step_times import PrefillRate

DECODE_S, PER_TOKEN_S = 0.01, 0.001


def duration(tokens: int) -> float:
    """Return the duration of a step that prefills these tokens and also decodes."""
    return DECODE_S + tokens * PER_TOKEN_S


def play(rate: PrefillRate, steps: list[int], in_flight: int) -> None:
    """Run steps that prefill these numbers of tokens, with up to `in_flight` steps scheduled ahead."""
    ends: list[float] = []
    now = 0.0
    for number, tokens in enumerate(steps):
        scheduled = ends[number - in_flight] if number >= in_flight else 0.0
        now = max(now, scheduled)
        if tokens or rate.is_timing:
            rate.step(now, tokens, DECODE_S)
        ends.append(max(ends[-1] if ends else 0.0, now) + duration(tokens))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    "steps",
    [
        [0] * 5 + [100] + [0] * 5,
        [0] * 5 + [64, 64, 36] + [0] * 3 + [200, 8] + [0] * 5,
        [0] * 5 + [50] * 200 + [0] * 5,
    ],
)
def test_the_time_of_decoding_does_not_count_as_prefill(in_flight: int, steps: list[int]) -> None:
    rate = PrefillRate(16)
    play(rate, steps, in_flight)
    assert rate.seconds_per_token == pytest.approx(PER_TOKEN_S, rel=0.01)


def test_idle_time_does_not_count_as_prefill() -> None:
    rate = PrefillRate(16)
    rate.step(5.0, 100, 0.0)
    rate.idle(5.2)
    rate.idle(9.0)
    rate.step(100.0, 100, 0.0)
    rate.idle(100.2)
    assert rate.seconds_per_token == pytest.approx(0.002)


def test_short_prefills_count_only_until_there_is_a_long_one() -> None:
    rate = PrefillRate(16)
    assert rate.seconds_per_token == 0
    rate.step(0.0, 4, 0.0)
    rate.idle(0.1)
    assert rate.seconds_per_token == pytest.approx(0.025)
    for tokens, begins in ((100, 1.0), (4, 2.0)):
        rate.step(begins, tokens, 0.0)
        rate.idle(begins + 0.1)
    assert rate.seconds_per_token == pytest.approx(0.001)


def test_the_prefill_rate_stays_positive() -> None:
    rate = PrefillRate(16)
    rate.step(0.0, 100, 5.0)
    rate.idle(1.0)
    assert rate.seconds_per_token == pytest.approx(0.1 / 100)


def test_a_clock_that_stands_still_measures_nothing() -> None:
    rate = PrefillRate(16)
    rate.step(1.0, 100, 0.0)
    rate.idle(1.0)
    assert rate.seconds_per_token == 0
    for took_s in (0.1, 0.0, 0.0):
        rate.step(2.0, 100, 0.0)
        rate.idle(2.0 + took_s)
    assert rate.seconds_per_token == pytest.approx(0.001)


def test_the_rate_is_the_median_of_three_prefills() -> None:
    rate = PrefillRate(16)
    for took_s in (0.1, 0.3, 0.2):
        rate.step(1.0, 100, 0.0)
        rate.idle(1.0 + took_s)
    assert rate.seconds_per_token == pytest.approx(0.002)
