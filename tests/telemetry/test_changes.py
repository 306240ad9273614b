from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.events import BlocksOffered, Event, RankReported
from kvoffload.model.ids import JobId, Rank
from kvoffload.model.wire import Direction
from kvoffload.telemetry import counters as counters_module
from kvoffload.telemetry import payload as payload_module
from kvoffload.telemetry.catalogue import BY_NAME, Hook, Kind, Series
from kvoffload.telemetry.payload import Changes, Payload, merge, split_labels
from tests.telemetry.fake_source import FakeSource
from tests.telemetry.streams import any_event

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")


class Engine(FakeSource):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.changes = Changes(self, lambda: self.now_s)
        self.first = self.changes.take()

    def step(self, *events: Event, is_busy: bool = False) -> Payload | None:
        for event in events:
            self.bus.publish(event)
        self.counters.hooks(deque([{Hook.STEP: 1e-5}]))
        return self.changes.take(is_busy=is_busy)

    def changed(self, *events: Event) -> Payload:
        change = self.step(*events)
        assert change is not None
        return change


def copied(seconds: float) -> RankReported:
    return RankReported(JobId(1), Rank(0), Direction.STORE, CopyOutcome.DONE, 10, 0.5, seconds)


def test_the_first_message_has_every_gauge_and_no_counter() -> None:
    first = Engine().first
    assert first is not None
    gauges = {name for name, metric in BY_NAME.items() if metric.kind is Kind.GAUGE}
    # The fake engine has no identity, which this gauge would show.
    assert first.keys() == gauges - {"kvoffload_info"}
    for name, series in first.items():
        assert set(map(split_labels, series)) == set(BY_NAME[name].series)


def test_a_step_without_changes_sends_nothing_for_a_second() -> None:
    engine = Engine()
    assert [engine.step() for _ in range(3)] == [None, None, None]
    engine.now_s = 1.0
    change = engine.step()
    assert change == {"kvoffload_hook_seconds": {"step": [1e-5] * 4}}
    assert engine.step() is None


def test_an_empty_change_is_never_sent() -> None:
    engine = Engine()
    engine.now_s = 5.0
    assert engine.changes.take() is None


def test_hook_times_are_sent_with_other_changes_as_json() -> None:
    engine = Engine()
    engine.step()
    change = engine.changed(BlocksOffered(3), copied(0.25))
    assert [json.loads(json.dumps(each)) for each in (engine.first, change)] == [engine.first, change]
    assert change["kvoffload_offered_blocks_total"] == {"": 3}
    assert of(change, Kind.HISTOGRAM) == {
        "kvoffload_hook_seconds": {"step": [1e-5, 1e-5]},
        "kvoffload_transfer_seconds": {"host,store": [0.25]},
        "kvoffload_transfer_queue_seconds": {"host,store": [0.5]},
    }


def test_a_gauge_is_sent_when_it_changes_and_when_it_disappears() -> None:
    engine = Engine()
    host: dict[str, Series] = {
        "kvoffload_slots": {("host", "ready"): 2},
        "kvoffload_capacity_slots": {("host",): 2},
    }
    engine.state = {**host, "kvoffload_degraded": {("invariant_broken",): 1}}
    change = engine.changed(BlocksOffered(1))
    assert of(change, Kind.GAUGE) == {
        "kvoffload_slots": {"host,ready": 2},
        "kvoffload_capacity_slots": {"host": 2},
        "kvoffload_degraded": {"invariant_broken": 1},
    }
    engine.state = host
    assert of(engine.changed(BlocksOffered(1)), Kind.GAUGE) == {"kvoffload_degraded": {"invariant_broken": 0}}


def test_an_unreadable_gauge_is_sent_as_0_and_an_unreadable_counter_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.state = {"kvoffload_capacity_slots": {("host",): 2}, "kvoffload_bus_dropped_total": {("log",): 3}}
    engine.step(BlocksOffered(1))
    with monkeypatch.context() as patched:
        patched.setattr(engine, "gauges", lambda _: {"kvoffload_degraded": {("handler_raised",): 1}})
        change = engine.changed(BlocksOffered(1))
    assert of(change, Kind.COUNTER) == {"kvoffload_offered_blocks_total": {"": 1}}
    assert of(change, Kind.GAUGE) == {
        "kvoffload_capacity_slots": {"host": 0},
        "kvoffload_degraded": {"handler_raised": 1},
    }
    change = engine.changed(BlocksOffered(1))
    assert of(change, Kind.COUNTER) == {"kvoffload_offered_blocks_total": {"": 1}}
    assert of(change, Kind.GAUGE) == {
        "kvoffload_capacity_slots": {"host": 2},
        "kvoffload_degraded": {"handler_raised": 0},
    }


def test_dropped_messages_are_sent_as_a_counter() -> None:
    engine = Engine()
    reported = []
    for dropped in (5, 7):
        engine.state = {"kvoffload_bus_dropped_total": {("journal",): dropped}}
        reported.append(engine.changed(BlocksOffered(1))["kvoffload_bus_dropped_total"])
    assert reported == [{"journal": 5}, {"journal": 2}]


def test_a_removed_observer_is_sent_without_other_changes() -> None:
    engine = Engine()
    engine.counters.add("kvoffload_bus_removed_total", "log")
    engine.counters.add("kvoffload_journal_write_errors_total")
    assert of(engine.changed(), Kind.COUNTER) == {
        "kvoffload_bus_removed_total": {"log": 1},
        "kvoffload_journal_write_errors_total": {"": 1},
    }


def test_the_number_of_untaken_samples_is_bounded() -> None:
    engine = Engine()
    limit = counters_module._KEPT
    for _ in range(limit + 10):
        engine.counters.hooks(deque([{Hook.STEP: 1e-5}]))
    samples = engine.counters.take_samples()["kvoffload_hook_seconds"][("step",)]
    assert len(samples) == limit
    assert engine.counters.take_samples() == {}


@given(st.lists(st.lists(any_event(), max_size=4), max_size=8))
def test_changes_add_up_to_the_counters(steps: list[list[Event]]) -> None:
    engine = Engine()
    counts: dict[tuple[str, str], float] = {}
    samples: dict[tuple[str, str], int] = {}
    for events in [*steps, []]:
        engine.now_s += 1
        change = engine.changed(*events)
        for key, added in flat(of(change, Kind.COUNTER)):
            assert added
            counts[key] = counts.get(key, 0) + added
        for key, kept in flat(of(change, Kind.HISTOGRAM)):
            samples[key] = samples.get(key, 0) + len(kept)
    snapshot = engine.counters.snapshot()
    assert counts == {key: number for key, number in flat(joined(snapshot.counts)) if number}
    assert samples == {key: one.samples for key, one in flat(joined(snapshot.distributions)) if one.samples}


@given(st.lists(st.tuples(st.lists(any_event(), max_size=4), st.booleans(), st.booleans()), max_size=30))
def test_messages_of_a_few_metrics_add_up_to_the_counters_and_gauges(
    steps: list[tuple[list[Event], bool, bool]],
) -> None:
    engine = Engine()
    total = engine.first or {}
    for number, (events, is_busy, degraded) in enumerate(steps):
        engine.state = {"kvoffload_degraded": {("invariant_broken",): int(degraded)}}
        if not is_busy:
            engine.now_s += 0.4 * (number % 3)
        merge(total, engine.step(*events, is_busy=is_busy) or {})
    engine.now_s += 1
    merge(total, engine.changed())
    snapshot = engine.counters.snapshot()
    counts = {key: number for key, number in flat(of(total, Kind.COUNTER)) if number}
    assert counts == {key: number for key, number in flat(joined(snapshot.counts)) if number}
    assert total["kvoffload_degraded"]["invariant_broken"] == (steps[-1][2] if steps else 0)
    assert total["kvoffload_slots"].keys() == {
        ",".join(labels) for labels in BY_NAME["kvoffload_slots"].series
    }


def test_a_busy_engine_sends_each_metric_once_a_second_and_few_in_a_step() -> None:
    engine = Engine()
    for name, metric in BY_NAME.items():
        if metric.kind is Kind.COUNTER and metric.read is None:
            engine.counters.add(name, *metric.series[0])
    sent = list[str]()
    while engine.now_s >= engine.changes.next_s or not sent:
        engine.now_s = max(engine.now_s, engine.changes.next_s)
        message = engine.step(is_busy=True) or {}
        assert len(message) <= payload_module._AT_ONCE
        sent += message
    counters = {
        name for name, metric in BY_NAME.items() if metric.kind is Kind.COUNTER and metric.read is None
    }
    assert len(sent) == len(set(sent))
    assert counters <= set(sent)
    assert engine.changes.next_s == engine.now_s + 1


def test_an_engine_that_becomes_idle_sends_all_metrics_at_once() -> None:
    engine = Engine()
    engine.now_s = 1.0
    total = engine.step(BlocksOffered(1), is_busy=True) or {}
    merge(total, engine.changed(BlocksOffered(1)))
    assert of(total, Kind.COUNTER) == {"kvoffload_offered_blocks_total": {"": 2}}
    assert of(total, Kind.HISTOGRAM) == {"kvoffload_hook_seconds": {"step": [1e-5] * 2}}
    assert engine.step() is None


def of(change: Payload, kind: Kind) -> Payload:
    return {name: series for name, series in change.items() if BY_NAME[name].kind is kind}


def joined(table: Mapping[str, Mapping[tuple[str, ...], T]]) -> dict[str, dict[str, T]]:
    return {
        name: {",".join(labels): value for labels, value in series.items()} for name, series in table.items()
    }


def flat(table: Mapping[str, Mapping[str, T]]) -> Iterator[tuple[tuple[str, str], T]]:
    return (((name, labels), value) for name, series in table.items() for labels, value in series.items())
