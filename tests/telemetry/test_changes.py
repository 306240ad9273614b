"""Changes sent step by step add up to the counts; steps without changes send nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.bus.bus import Bus
from kvoffload.model.causes import CopyOutcome, DegradeCause
from kvoffload.model.events import BlocksOffered, Event, RankReported
from kvoffload.model.ids import JobId, Rank
from kvoffload.model.transfer import Direction
from kvoffload.telemetry import counters as counters_module
from kvoffload.telemetry.catalogue import BY_NAME, Kind
from kvoffload.telemetry.changes import Change, Changes
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.gauges import GaugeSnapshot
from kvoffload.telemetry.labels import Hook
from tests.telemetry.streams import any_event

T = TypeVar("T")


class Engine:
    """Something that counts, with a clock by hand."""

    def __init__(self) -> None:
        self.bus, self.counters = Bus(), Counters()
        self.counters.subscribe(self.bus)
        self.state = GaugeSnapshot()
        self.now_s = 0.0
        self.changes = Changes(self, lambda: self.now_s)
        self.first = self.changes.take()

    def gauges(self) -> GaugeSnapshot:
        return self.state

    def step(self, *events: Event) -> Change | None:
        for event in events:
            self.bus.publish(event)
        self.counters.hook(Hook.STEP, 1e-5)
        return self.changes.take()


def copied(seconds: float) -> RankReported:
    return RankReported(JobId(1), Rank(0), Direction.STORE, CopyOutcome.DONE, 10, 0.5, seconds)


def test_at_first_every_gauge_is_sent_and_no_counter() -> None:
    first = Engine().first
    assert first is not None
    gauges = {name for name, metric in BY_NAME.items() if metric.kind is Kind.GAUGE}
    assert first.gauges.keys() == gauges - {"kvoffload_info"}  # this engine knows nothing of itself
    assert all(set(series) == set(BY_NAME[name].series) for name, series in first.gauges.items())
    assert not first.counts
    assert not first.samples


def test_a_step_without_changes_sends_nothing_until_a_second_is_over() -> None:
    engine = Engine()
    assert [engine.step() for _ in range(3)] == [None, None, None]
    engine.now_s = 1.0
    change = engine.step()
    assert change == Change(samples={"kvoffload_hook_seconds": {("step",): [1e-5] * 4}})
    assert engine.step() is None


def test_an_empty_change_is_never_sent() -> None:
    engine = Engine()
    engine.now_s = 5.0
    assert engine.changes.take() is None


def test_times_of_hooks_go_with_other_changes() -> None:
    engine = Engine()
    engine.step()
    change = engine.step(BlocksOffered(3), copied(0.25))
    assert change is not None
    assert change.counts["kvoffload_offered_blocks_total"] == {(): 3}
    assert change.samples == {
        "kvoffload_hook_seconds": {("step",): [1e-5, 1e-5]},
        "kvoffload_transfer_seconds": {("host", "store"): [0.25]},
        "kvoffload_transfer_queue_seconds": {("host", "store"): [0.5]},
    }


def test_gauges_are_sent_when_they_change_also_back_to_nothing() -> None:
    engine = Engine()
    engine.state = GaugeSnapshot({"ready": 2}, 2, degraded=DegradeCause.LAW_BROKEN)
    change = engine.step(BlocksOffered(1))
    assert change is not None
    assert change.gauges == {
        "kvoffload_slots": {("host", "ready"): 2},
        "kvoffload_capacity_slots": {("host",): 2},
        "kvoffload_degraded": {("law_broken",): 1},
    }
    engine.state = GaugeSnapshot({"ready": 2}, 2)
    change = engine.step(BlocksOffered(1))
    assert change is not None
    assert change.gauges == {"kvoffload_degraded": {("law_broken",): 0}}


def test_what_feeds_dropped_is_a_counter() -> None:
    engine = Engine()
    reported = []
    for dropped in (5, 7):
        engine.state = GaugeSnapshot(dropped={"journal": dropped})
        change = engine.step(BlocksOffered(1))
        assert change is not None
        reported.append(change.counts["kvoffload_bus_dropped_total"])
    assert reported == [{("journal",): 5}, {("journal",): 2}]


def test_an_observer_that_was_removed_is_a_change_by_itself() -> None:
    engine = Engine()
    engine.counters.removed("log")
    engine.counters.journal_failed()
    change = engine.step()
    assert change is not None
    assert change.counts == {
        "kvoffload_bus_removed_total": {("log",): 1},
        "kvoffload_journal_write_errors_total": {(): 1},
    }


def test_samples_that_are_not_taken_do_not_pile_up() -> None:
    engine = Engine()
    limit = counters_module._KEPT
    for _ in range(limit + 10):
        engine.counters.hook(Hook.STEP, 1e-5)
    samples = engine.counters.take_samples()["kvoffload_hook_seconds"][("step",)]
    assert len(samples) == limit
    assert engine.counters.take_samples() == {}


@given(st.lists(st.lists(any_event(), max_size=4), max_size=8))
def test_changes_add_up_to_what_was_counted(steps: list[list[Event]]) -> None:
    engine = Engine()
    counts: dict[tuple[str, tuple[str, ...]], float] = {}
    samples: dict[tuple[str, tuple[str, ...]], int] = {}
    for events in [*steps, []]:
        engine.now_s += 1
        change = engine.step(*events)
        assert change is not None
        for key, added in flat(change.counts):
            assert added
            counts[key] = counts.get(key, 0) + added
        for key, kept in flat(change.samples):
            samples[key] = samples.get(key, 0) + len(kept)
    snapshot = engine.counters.snapshot()
    assert counts == {key: number for key, number in flat(snapshot.counts) if number}
    assert samples == {key: one.samples for key, one in flat(snapshot.distributions) if one.samples}


def flat(
    table: Mapping[str, Mapping[tuple[str, ...], T]],
) -> Iterator[tuple[tuple[str, tuple[str, ...]], T]]:
    return (((name, labels), value) for name, series in table.items() for labels, value in series.items())
