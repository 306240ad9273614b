from __future__ import annotations

import pytest

from kvoffload.bus.bus import Bus
from kvoffload.model.events import LookupAnswered
from kvoffload.model.ids import RequestId
from kvoffload.runtime.copies import HookTime
from kvoffload.runtime.step_times import FirstTokens
from kvoffload.telemetry.counters import Counters

A = RequestId("a")


class Engine:
    """A fake engine that publishes the test's facts, and counts how often first tokens are checked."""

    def __init__(self) -> None:
        self.hook = HookTime(10.0)
        self.counters = Counters()
        self._bus = Bus()
        self.counters.subscribe(self._bus)
        self.first_tokens = FirstTokens(self.hook, self._bus)
        self.tokens: set[RequestId] = set()
        self.asked = 0

    def seen(self, request: RequestId = A) -> None:
        def has_token() -> bool:
            self.asked += 1
            return request in self.tokens

        self.first_tokens.waiting[request] = self.hook.now, has_token

    def admitted(self, device: int = 0, host: int = 0, request: RequestId = A) -> None:
        self._bus.publish(LookupAnswered(request, device, host // 16, 0, host, 0, None))

    def step(self, seconds: float = 1.0) -> None:
        self.hook.now += seconds
        self._bus.dispatch([*self.first_tokens.look()])

    def ended(self, request: RequestId = A) -> None:
        if request in self.first_tokens.waiting:
            self._bus.dispatch([*self.first_tokens.ended(request)])

    def times(self) -> dict[str, tuple[int, float]]:
        found = self.counters.snapshot().distributions["kvoffload_first_token_seconds"]
        return {labels[0]: (one.samples, one.total) for labels, one in found.items() if one.samples}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize(
    ("device", "host", "found"), [(0, 0, "nothing"), (16, 0, "device"), (0, 32, "host"), (16, 32, "host")]
)
def test_a_time_to_first_token_starts_when_the_request_is_seen(
    engine: Engine, device: int, host: int, found: str
) -> None:
    engine.seen()
    engine.step()
    engine.admitted(device, host)
    engine.step()
    engine.step()
    assert engine.times() == {}
    engine.tokens.add(A)
    engine.step()
    engine.step()
    engine.ended()
    assert engine.times() == {found: (1, 4.0)}


def test_waiting_requests_and_requests_with_a_token_are_not_checked(engine: Engine) -> None:
    engine.seen()
    engine.step()
    assert engine.asked == 0
    engine.admitted()
    engine.tokens.add(A)
    engine.step()
    engine.step()
    assert engine.asked == 1


def test_a_request_whose_only_token_came_in_its_last_step_is_counted(engine: Engine) -> None:
    engine.seen()
    engine.admitted()
    engine.tokens.add(A)
    engine.hook.now += 3
    engine.ended()
    assert engine.times() == {"nothing": (1, 3.0)}


def test_a_request_that_ends_without_a_token_is_not_counted(engine: Engine) -> None:
    waiting = RequestId("waiting")
    engine.seen()
    engine.seen(waiting)
    engine.admitted()
    engine.ended()
    engine.ended(waiting)
    engine.step()
    assert engine.times() == {}
    assert not engine.first_tokens.admitted
    assert not engine.first_tokens.waiting


def test_the_last_lookup_before_the_first_token_counts(engine: Engine) -> None:
    engine.seen()
    engine.admitted(host=32)
    engine.step()
    engine.admitted()
    engine.tokens.add(A)
    engine.step()
    engine.admitted(host=32)
    engine.step()
    engine.ended()
    assert engine.times() == {"nothing": (1, 2.0)}


def test_the_tokens_of_a_failed_load_count_as_computed(engine: Engine) -> None:
    engine.seen()
    engine.admitted(device=16, host=32)
    engine.first_tokens.load_failed(A)
    engine.first_tokens.load_failed(RequestId("one that is gone"))
    engine.tokens.add(A)
    engine.step()
    assert engine.times() == {"device": (1, 1.0)}
    counted = engine.counters.snapshot()
    assert counted.by_label("kvoffload_prompt_tokens_total") == {"computed": 32, "device": 16}


def test_first_tokens_are_not_checked_for_an_engine_that_does_not_report_tokens(engine: Engine) -> None:
    engine.admitted()
    engine.step()
    engine.ended()
    assert engine.times() == {}
