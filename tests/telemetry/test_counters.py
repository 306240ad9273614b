from __future__ import annotations

import pickle
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvoffload.bus.bus import Bus
from kvoffload.model.causes import (
    CopyOutcome,
    Deferral,
    EvictionCause,
    LoadOutcome,
    MissCause,
    PinDropCause,
    RejectionCause,
    StoreOutcome,
    TierOutcome,
)
from kvoffload.model.events import (
    AdoptedBlocksHit,
    BlocksAdopted,
    BlocksEvicted,
    BlocksOffered,
    BlocksZeroed,
    BoundaryAsked,
    BoundaryMade,
    Event,
    FactRejected,
    FirstTokenReached,
    HitDropped,
    JobAbandoned,
    LoadEnded,
    LoadScheduled,
    LookupAnswered,
    LookupDeferred,
    RankReported,
    ResetStarted,
    SessionEnded,
    StatesCopied,
    StoreEnded,
    TierBlocksEvicted,
    TierCopyEnded,
    TierCopyScheduled,
)
from kvoffload.model.facts import Fact, TierAnswered
from kvoffload.model.ids import BlockKey, JobId, Rank, RequestId
from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.catalogue import BY_NAME, Hook, subscriber_label
from kvoffload.telemetry.counters import Counters, Snapshot
from tests.conservation import conservation
from tests.telemetry.streams import any_event

A, JOB, CORRUPT = RequestId("a"), JobId(1), TierOutcome.CORRUPT


def count(*published: Event | Fact) -> Snapshot:
    bus, counters, removed = Bus(), Counters(), list[str]()
    bus.on_removed = lambda name, _: removed.append(name)
    counters.subscribe(bus)
    for event in published:
        bus.publish(event)
    assert not removed
    snapshot = counters.snapshot()
    counts = {
        name: {labels: number for labels, number in series.items() if number}
        for name, series in snapshot.counts.items()
    }
    return Snapshot({name: series for name, series in counts.items() if series}, snapshot.distributions)


def test_copies_are_counted_per_tier() -> None:
    host = RankReported(JOB, Rank(0), Direction.LOAD, CopyOutcome.DONE, 100, 0.1, 0.2)
    change = count(host, replace(host, copied_bytes=7, tier=Tier.DISK))
    assert change.counts["kvoffload_transfer_bytes_total"] == {("host", "load"): 100, ("disk", "load"): 7}
    assert change.samples("kvoffload_transfer_seconds", "disk", "load") == 1
    assert conservation(change) == []


@pytest.mark.parametrize(
    ("event", "name", "labels", "amount"),
    [
        (LookupDeferred(A, Deferral.OTHERS_LOAD, A), "lookups_deferred_total", ("others_load",), 1),
        (LookupDeferred(A, Deferral.FETCH), "lookups_deferred_total", ("fetch",), 1),
        (LookupDeferred(A, Deferral.ROOM), "lookups_deferred_total", ("room",), 1),
        (
            TierCopyScheduled(JOB, Tier.DISK, Direction.STORE, 5),
            "tier_scheduled_blocks_total",
            ("disk", "store"),
            5,
        ),
        (
            TierCopyEnded(JOB, Tier.DISK, Direction.LOAD, 5, CORRUPT),
            "tier_blocks_total",
            ("disk", "load", "corrupt"),
            5,
        ),
        (TierBlocksEvicted(Tier.DISK, 5, EvictionCause.SPACE), "evicted_blocks_total", ("disk", "space"), 5),
        (HitDropped(A, 5, PinDropCause.RESET), "pin_dropped_blocks_total", ("reset",), 5),
        (BlocksOffered(5), "offered_blocks_total", (), 5),
        (StatesCopied(Direction.LOAD, 5), "state_blocks_total", ("load",), 5),
        (BoundaryAsked(A, 5), "prefix_boundaries_asked_total", (), 1),
        (BoundaryMade(A, 5), "prefix_boundaries_made_total", (), 1),
        (StoreEnded(StoreOutcome.STALE, 5), "store_blocks_total", ("stale",), 5),
        (LoadScheduled(JOB, A, 5, 80), "load_scheduled_blocks_total", (), 5),
        (LoadEnded(JOB, A, 5, LoadOutcome.CORRUPT), "load_blocks_total", ("corrupt",), 5),
        (BlocksEvicted(5, EvictionCause.SPACE), "evicted_blocks_total", ("host", "space"), 5),
        (BlocksAdopted(5), "adopted_blocks_total", (), 5),
        (AdoptedBlocksHit(5), "adopted_hit_blocks_total", (), 5),
        (BlocksZeroed(5), "stale_blocks_zeroed_total", (), 5),
        (SessionEnded(A, 5), "ended_session_blocks_total", (), 5),
        (ResetStarted(1, 2, 3, 4), "resets_total", (), 1),
        (FactRejected(RejectionCause.UNKNOWN_JOB), "contract_violations_total", ("unknown_job",), 1),
    ],
)
def test_each_event_adds_to_its_series(event: Event, name: str, labels: tuple[str, ...], amount: int) -> None:
    assert count(event).counts == {f"kvoffload_{name}": {labels: amount}}


def test_a_lookup_counts_only_its_first_missing_block_under_its_cause() -> None:
    assert count(LookupAnswered(A, 0, 3, 4, 48, 60, MissCause.EVICTED)).counts == {
        "kvoffload_lookup_blocks_total": {("hit",): 3, ("miss",): 4},
        "kvoffload_lookup_tokens_total": {("hit",): 48, ("miss",): 60},
        "kvoffload_miss_blocks_total": {("evicted",): 1, ("behind_miss",): 3},
    }
    assert "kvoffload_miss_blocks_total" not in count(LookupAnswered(A, 0, 3, 0, 48, 0, None)).counts


def test_a_request_that_opted_out_counts_no_miss() -> None:
    change = count(LookupAnswered(A, 0, 0, 4, 0, 60, None, opted_out=True))
    assert change.counts == {
        "kvoffload_lookup_blocks_total": {("opted_out",): 4},
        "kvoffload_lookup_tokens_total": {("opted_out",): 60},
    }
    assert conservation(change) == []


def test_fetched_tokens_of_one_request_are_counted_for_both_tiers() -> None:
    answered = LookupAnswered(A, 0, 3, 0, 48, 0, None, ((Tier.DISK, 16), (Tier.REMOTE, 8)))
    reached = FirstTokenReached(A, Tier.REMOTE, 0.5, 0, 24, answered.fetched, 0)
    counts = count(answered, reached).counts
    assert counts["kvoffload_fetched_tokens_total"] == {("disk",): 16, ("remote",): 8}
    assert counts["kvoffload_prompt_tokens_total"] == {("host",): 24, ("disk",): 16, ("remote",): 8}


def test_answers_of_the_remote_tier_are_counted_and_timed() -> None:
    keys = tuple(map(BlockKey, (b"one", b"two", b"three")))
    change = count(
        TierAnswered(Tier.REMOTE, A, "print/one", keys[:2], keys[2:], 0, 0.25),
        TierAnswered(Tier.REMOTE, A, "print/one", unanswered=7, seconds=2.0),
    )
    assert change.counts == {
        "kvoffload_remote_asked_blocks_total": {("found",): 2, ("missing",): 1, ("none",): 7}
    }
    assert change.distributions["kvoffload_remote_ask_seconds"][()].total == 0.25


def test_an_abandoned_jobs_blocks_are_counted() -> None:
    assert count(JobAbandoned(JOB, Direction.LOAD, 5)).counts == {
        "kvoffload_abandoned_jobs_total": {("load",): 1},
        "kvoffload_abandoned_blocks_total": {("load",): 5},
    }


def test_successful_copies_are_timed_and_failed_ones_are_not() -> None:
    done = RankReported(JOB, Rank(0), Direction.LOAD, CopyOutcome.DONE, 4096, 0.0001, 0.002)
    failed = RankReported(JOB, Rank(1), Direction.LOAD, CopyOutcome.FAILED, 0, 9.0, 9.0)
    change = count(done, failed)
    assert change.counts == {
        "kvoffload_transfers_total": {("host", "load", "done"): 1, ("host", "load", "failed"): 1},
        "kvoffload_transfer_bytes_total": {("host", "load"): 4096},
    }
    copy = change.distributions["kvoffload_transfer_seconds"][("host", "load")]
    queue = change.distributions["kvoffload_transfer_queue_seconds"][("host", "load")]
    assert (copy.samples, copy.total, queue.samples, queue.total) == (1, 0.002, 1, 0.0001)
    bounds = BY_NAME["kvoffload_transfer_queue_seconds"].buckets
    # a bucket includes the samples that equal its upper bound
    assert queue.counts.index(1) == bounds.index(0.0001)


def test_each_hook_of_a_step_adds_a_sample() -> None:
    counters = Counters()
    counters.hooks(deque([{Hook.LOOKUP: 1e-6, Hook.STEP: 1e-6}]))
    counters.hooks(deque([{Hook.LOOKUP: 1e3}]))
    series = counters.snapshot().distributions["kvoffload_hook_seconds"]
    assert (series[("lookup",)].counts[0], series[("lookup",)].counts[-1]) == (1, 1)
    assert series[("step",)].samples == 1


def test_removed_observers_are_counted_by_name() -> None:
    counters = Counters()
    for name in ("journal", "somebody's own"):
        counters.add("kvoffload_bus_removed_total", subscriber_label(name))
    assert counters.changes == 2
    assert counters.snapshot().by_label("kvoffload_bus_removed_total") == {"journal": 1, "other": 1}


@given(st.lists(any_event(), max_size=30), st.integers(0, 30))
def test_property_snapshots_differ_by_the_events_between_them(stream: list[Event], cut: int) -> None:
    bus, counters = Bus(), Counters()
    counters.subscribe(bus)
    for event in stream[:cut]:
        bus.publish(event)
    before = counters.snapshot()
    assert before.minus(before) == Snapshot()
    for event in stream[cut:]:
        bus.publish(event)
    assert counters.snapshot().minus(before).counts == count(*stream[cut:]).counts


@example([RankReported(JOB, Rank(0), Direction.LOAD, CopyOutcome.DONE, 4096, 0.0001, 0.002)])
@given(st.lists(any_event(), max_size=20))
def test_property_a_snapshot_survives_pickle(stream: list[Event]) -> None:
    snapshot = count(*stream)
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot


def test_a_snapshot_does_not_change_afterwards() -> None:
    bus, counters = Bus(), Counters()
    counters.subscribe(bus)
    snapshot = counters.snapshot()
    bus.publish(BlocksOffered(1))
    counters.hooks(deque([{Hook.STEP: 1.0}]))
    assert snapshot == Counters().snapshot()


@given(st.lists(any_event(), max_size=30))
def test_property_miss_causes_sum_to_the_missed_blocks(stream: list[Event]) -> None:
    offered = sum(event.blocks for event in stream if isinstance(event, StoreEnded))
    scheduled = sum(event.blocks for event in stream if isinstance(event, LoadEnded))
    with_disk = sum(event.blocks for event in stream if isinstance(event, TierCopyEnded))
    totals = BlocksOffered | LoadScheduled | TierCopyScheduled
    stream = [event for event in stream if not isinstance(event, totals)]
    begun = [TierCopyScheduled(JOB, Tier.DISK, Direction.LOAD, with_disk), *stream]
    snapshot = count(BlocksOffered(offered), LoadScheduled(JOB, A, scheduled, 0), *begun)
    assert conservation(snapshot, drained=True) == []


SCHEDULED = TierCopyScheduled(JOB, Tier.DISK, Direction.STORE, 3)
ENDED = TierCopyEnded(JOB, Tier.DISK, Direction.STORE, 3, TierOutcome.DONE)


@pytest.mark.parametrize(
    ("events", "drained", "problem"),
    [
        ([BlocksOffered(1), LoadScheduled(JOB, A, 1, 16), SCHEDULED], False, None),
        ([SCHEDULED, ENDED], True, None),
        ([SCHEDULED], True, "kvoffload_tier_scheduled_blocks_total is 3"),
        ([SCHEDULED, ENDED, ENDED], False, "kvoffload_tier_scheduled_blocks_total is 3"),
        ([LookupAnswered(A, 0, 0, 2, 0, 32, None)], False, "2 blocks missed, but the causes sum to 0"),
        ([StoreEnded(StoreOutcome.STORED, 1)], False, "kvoffload_offered_blocks_total is 0"),
        ([BlocksOffered(1)], True, "kvoffload_offered_blocks_total is 1"),
        ([LoadScheduled(JOB, A, 1, 16)], True, "kvoffload_load_scheduled_blocks_total is 1"),
        ([BlocksZeroed(-1)], False, "counters never shrink"),
    ],
)
def test_broken_invariants_are_reported(events: list[Event], drained: bool, problem: str | None) -> None:
    reported = conservation(count(*events), drained=drained)
    assert len(reported) == (problem is not None)
    assert all(str(problem) in each for each in reported)
