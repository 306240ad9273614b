from __future__ import annotations

import pytest

from kvoffload.bus.bus import Bus
from kvoffload.bus.current_hook import CurrentHook
from kvoffload.model.causes import LoadOutcome
from kvoffload.model.events import LoadEnded, LookupAnswered
from kvoffload.model.facts import RequestEnded, RequestSeen, StepScheduled
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.wire import Direction
from kvoffload.runtime.step_times import Copies, FirstTokens, PrefillRate, StepTimes
from kvoffload.telemetry.counters import Counters

# -- steps that only decode -------------------------------------------------------------------------------------

STORES, LOADS = (Direction.STORE,), (Direction.LOAD,)
BOTH = STORES + LOADS


def steps(times: StepTimes, seconds: float, copies: Copies = (), tokens: int = 4, count: int = 400) -> None:
    for _ in range(count):
        times.observe(seconds, tokens, copies)


@pytest.fixture
def times() -> StepTimes:
    """Return measurements of steps that took 10 ms without copies."""
    made = StepTimes()
    steps(made, 0.010)
    return made


def test_only_steps_of_similar_size_are_compared(times: StepTimes) -> None:
    steps(times, 0.040, tokens=1 << 40)
    steps(times, 0.012, STORES, tokens=5)
    assert times.usual_s(6) == pytest.approx(0.010)
    assert times.usual_s(1 << 40) == pytest.approx(0.040)
    assert times.slowdown(STORES) == pytest.approx(0.2, rel=0.01)
    assert times.slowdown(LOADS) == times.slowdown(BOTH) == 0


def test_a_step_size_that_never_ran_without_copies_has_no_estimate() -> None:
    times = StepTimes()
    steps(times, 0.010, LOADS)
    assert times.usual_s(4) == times.slowdown(LOADS) == 0


def test_faster_steps_during_copies_do_not_count_as_a_benefit(times: StepTimes) -> None:
    steps(times, 0.008, BOTH)
    assert times.slowdown(BOTH) == 0


def test_a_single_stall_changes_the_estimate_little(times: StepTimes) -> None:
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
def test_steps_scheduled_back_to_back_change_the_estimate_little(times: StepTimes, seconds: float) -> None:
    steps(times, seconds, count=1)
    assert times.usual_s(4) >= 0.0095


# -- steps that prefill -----------------------------------------------------------------------------------------

DECODE_S, PER_TOKEN_S = 0.01, 0.001


def play(rate: PrefillRate, prefills: list[int], in_flight: int) -> None:
    """Run steps that prefill these numbers of tokens and also decode, `in_flight` of them scheduled ahead."""
    ends: list[float] = []
    now = 0.0
    for number, tokens in enumerate(prefills):
        now = max(now, ends[number - in_flight] if number >= in_flight else 0.0)
        if tokens or rate.is_timing:
            rate.step(now, tokens, DECODE_S)
        ends.append(max(ends[-1] if ends else 0.0, now) + DECODE_S + tokens * PER_TOKEN_S)


def prefill(rate: PrefillRate, begins: float, seconds: float, tokens: int = 100) -> None:
    """Run one step that only prefills, after which the engine is idle."""
    rate.step(begins, tokens, 0.0)
    rate.idle(begins + seconds)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("middle", [[100], [64, 64, 36, 0, 0, 0, 200, 8], [50] * 200])
def test_the_time_of_decoding_does_not_count_as_prefill(in_flight: int, middle: list[int]) -> None:
    rate = PrefillRate(16)
    play(rate, [0] * 5 + middle + [0] * 5, in_flight)
    assert rate.seconds_per_token == pytest.approx(PER_TOKEN_S, rel=0.01)


def test_idle_time_does_not_count_as_prefill() -> None:
    rate = PrefillRate(16)
    prefill(rate, 5.0, 0.2)
    rate.idle(9.0)
    prefill(rate, 100.0, 0.2)
    assert rate.seconds_per_token == pytest.approx(0.002)


def test_short_prefills_count_only_until_there_is_a_long_one() -> None:
    rate = PrefillRate(16)
    assert rate.seconds_per_token == 0
    prefill(rate, 0.0, 0.1, tokens=4)
    assert rate.seconds_per_token == pytest.approx(0.025)
    prefill(rate, 1.0, 0.1)
    prefill(rate, 2.0, 0.1, tokens=4)
    assert rate.seconds_per_token == pytest.approx(0.001)


def test_the_prefill_rate_stays_positive() -> None:
    rate = PrefillRate(16)
    rate.step(0.0, 100, 5.0)
    rate.idle(1.0)
    assert rate.seconds_per_token == pytest.approx(0.1 / 100)


def test_a_clock_that_stands_still_measures_nothing() -> None:
    rate = PrefillRate(16)
    prefill(rate, 1.0, 0.0)
    assert rate.seconds_per_token == 0
    for seconds in (0.1, 0.0, 0.0):
        prefill(rate, 2.0, seconds)
    assert rate.seconds_per_token == pytest.approx(0.001)


def test_the_rate_is_the_median_of_three_prefills() -> None:
    rate = PrefillRate(16)
    for seconds in (0.1, 0.3, 0.2):
        prefill(rate, 1.0, seconds)
    assert rate.seconds_per_token == pytest.approx(0.002)


# -- first tokens -----------------------------------------------------------------------------------------------

A = RequestId("a")


class Engine:
    """A fake engine that publishes the test's facts, and counts how often first tokens are checked."""

    def __init__(self) -> None:
        self.hook = CurrentHook(lambda: 10.0)
        self.counters = Counters()
        self._bus = Bus(self.hook)
        self.counters.subscribe(self._bus)
        self.first_tokens = FirstTokens(self._bus)
        self.is_measured = True
        self.has_token = False
        self.asked = 0

    def seen(self) -> None:
        def has_token() -> bool:
            self.asked += 1
            return self.has_token

        self.hook.has_token = has_token if self.is_measured else None
        self._bus.publish(RequestSeen(A, 33, ()))

    def admitted(self, device: int = 0, host: int = 0) -> None:
        self._bus.publish(LookupAnswered(A, device, host // 16, 0, host, 0, None))

    def load_failed(self, request: RequestId) -> None:
        self._bus.publish(LoadEnded(JobId(1), request, 2, LoadOutcome.FAILED))

    def step(self, seconds: float = 1.0) -> None:
        self.hook.now += seconds
        self._bus.publish(StepScheduled(1))

    def ended(self) -> None:
        self._bus.publish(RequestEnded(A, 0, (), holds_blocks=False))

    def times(self) -> dict[str, tuple[int, float]]:
        found = self.counters.snapshot().distributions["kvoffload_first_token_seconds"]
        return {labels[0]: (one.samples, one.total) for labels, one in found.items() if one.samples}


@pytest.fixture
def engine() -> Engine:
    """Return an engine that has seen one request."""
    made = Engine()
    made.seen()
    return made


@pytest.mark.parametrize(
    ("device", "host", "found"), [(0, 0, "nothing"), (16, 0, "device"), (0, 32, "host"), (16, 32, "host")]
)
def test_a_time_to_first_token_starts_when_the_request_is_seen(
    engine: Engine, device: int, host: int, found: str
) -> None:
    engine.step()
    engine.admitted(device, host)
    engine.step()
    engine.step()
    assert engine.times() == {}
    engine.has_token = True
    engine.step()
    engine.step()
    engine.ended()
    assert engine.times() == {found: (1, 4.0)}


def test_waiting_requests_and_requests_with_a_token_are_not_checked(engine: Engine) -> None:
    engine.step()
    assert engine.asked == 0
    engine.admitted()
    engine.has_token = True
    engine.step()
    engine.step()
    assert engine.asked == 1


def test_a_request_whose_only_token_came_in_its_last_step_is_counted(engine: Engine) -> None:
    engine.admitted()
    engine.has_token = True
    engine.hook.now += 3
    engine.ended()
    assert engine.times() == {"nothing": (1, 3.0)}


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_request_that_ends_without_a_token_is_not_counted(engine: Engine, is_admitted: bool) -> None:
    if is_admitted:
        engine.admitted()
    engine.ended()
    engine.step()
    assert engine.times() == {}
    assert not engine.first_tokens._admitted
    assert not engine.first_tokens._waiting


def test_the_last_lookup_before_the_first_token_counts(engine: Engine) -> None:
    engine.admitted(host=32)
    engine.step()
    engine.admitted()
    engine.has_token = True
    engine.step()
    engine.admitted(host=32)
    engine.step()
    engine.ended()
    assert engine.times() == {"nothing": (1, 2.0)}


def test_the_tokens_of_a_failed_load_count_as_computed(engine: Engine) -> None:
    engine.admitted(device=16, host=32)
    engine.load_failed(A)
    engine.load_failed(RequestId("one that is gone"))
    engine.has_token = True
    engine.step()
    assert engine.times() == {"device": (1, 1.0)}
    counted = engine.counters.snapshot()
    assert counted.by_label("kvoffload_prompt_tokens_total") == {"computed": 32, "device": 16}


def test_first_tokens_are_not_checked_for_an_engine_that_does_not_report_tokens() -> None:
    engine = Engine()
    engine.is_measured = False
    engine.seen()
    engine.admitted()
    engine.step()
    engine.ended()
    assert engine.times() == {}
