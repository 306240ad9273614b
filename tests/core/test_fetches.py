from __future__ import annotations

from typing import cast

import pytest

from kvoffload.core.jobs import Jobs, Owner, Spill
from kvoffload.core.machine import SlotState
from kvoffload.core.request import RequestRecord
from kvoffload.core.tiers import DiskTier, LayeredIndex, LowerTier
from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import LookupAnswered, LookupDeferred, TierCopyScheduled
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import JobId, Rank, RequestId, SlotId
from kvoffload.model.wire import Tier
from tests.core.disk_world import DiskWorld
from tests.core.lower_world import LOAD, OTHER, STORE, TEXT
from tests.core.remote_world import RemoteWorld, TieredWorld
from tests.core.world import World, full, key_at, keys_of, recurrent, window


def fetches(world: DiskWorld) -> list[TierCopyScheduled]:
    return [each for each in world.reported(TierCopyScheduled) if each.direction is LOAD]


# -- with its request -------------------------------------------------------------------------------------------


def test_a_fetch_begins_when_its_request_arrives() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    request = world.add("late", TEXT)
    assert [(each.blocks, each.request, each.tokens) for each in fetches(world)] == [(3, request.name, 12)]
    world.copy_all()
    assert world.admit(request) == 12


def test_only_the_fetched_part_of_a_hit_counts_as_fetched() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    world.only_on_host(TEXT[:5])
    assert world.admit(world.fetched("late")) == 12
    answer = world.reported(LookupAnswered)[-1]
    assert (answer.hit_tokens, answer.fetched) == (12, ((Tier.DISK, 8),))


def test_a_hit_from_three_tiers_counts_each_token_for_the_tier_that_had_it() -> None:
    shared = RemoteWorld(host=32)
    shared.share(TEXT)
    world = TieredWorld.holding(TEXT[:9], store=shared.store, host=32)
    world.only_on_host(TEXT[:5])
    assert (world.on_host(TEXT), world.below(TEXT), world.in_store(TEXT)) == ("x...", "xx..", "xxx.")
    request = world.fetched("late")
    assert world.admit(request) == 12
    answer = world.reported(LookupAnswered)[-1]
    assert (answer.hit_tokens, answer.fetched) == (12, ((Tier.DISK, 4), (Tier.REMOTE, 4)))
    assert world.core.fetched_tokens(request.name, 12) == {Tier.DISK: 4, Tier.REMOTE: 4}
    assert world.core.fetched_tokens(request.name, 8) == {Tier.DISK: 4}
    assert world.core.fetched_tokens(RequestId("unknown"), 12) == {}


def test_after_a_preemption_the_fetched_blocks_are_found_on_the_host() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    request = world.fetched("late")
    assert world.admit(request) == 12
    world.load_and_run(request)
    world.preempt(request)
    world.device.forget_keys()
    assert world.admit(request) == 12
    assert [each.fetched for each in world.reported(LookupAnswered)[-2:]] == [((Tier.DISK, 12),), ()]


DISK, REMOTE = Tier.DISK, Tier.REMOTE


@pytest.mark.parametrize(
    ("groups", "fetched", "start", "tokens"),
    [
        ((full(),), {}, 0, (0, 0)),
        ((full(),), {(0, 0): DISK, (0, 2): REMOTE}, 0, (4, 4)),
        ((full(),), {(0, 0): DISK, (0, 2): REMOTE}, 4, (0, 4)),
        ((full(),), {(0, 3): DISK}, 0, (0, 0)),
        ((full(), full(group=1)), {(0, 1): REMOTE, (1, 1): DISK, (1, 2): DISK}, 0, (4, 4)),
        ((full(), window(6, group=1)), {(1, 1): DISK}, 0, (4, 0)),
        ((full(), window(6, 2, group=1)), {(0, 2): DISK, (1, 4): REMOTE}, 0, (2, 2)),
        ((window(6),), {(0, 0): REMOTE, (0, 1): DISK}, 0, (8, 0)),
        ((window(6),), {(0, 2): DISK}, 0, (4, 0)),
        ((full(), recurrent(group=1)), {(0, 0): DISK, (1, 2): DISK}, 4, (8, 0)),
    ],
    ids=str,
)
def test_tokens_count_for_the_lowest_tier_of_the_blocks_that_they_need(
    groups: tuple[GroupSpec, ...],
    fetched: dict[tuple[int, int], Tier],
    start: int,
    tokens: tuple[int, int],
) -> None:
    """Of a hit of 12 tokens, `fetched` has the tiers of some blocks, by group and position."""
    record = RequestRecord(RequestId("a"), 16, tuple(keys_of(TEXT, group) for group in groups))
    record.fetched_from = {record.keys[group][at]: tier for (group, at), tier in fetched.items()}
    by_tier = record.fetched_tokens(start, 12, World(*groups).shape)
    assert (by_tier.get(DISK, 0), by_tier.get(REMOTE, 0)) == tokens


def test_a_block_in_the_hosts_first_slot_is_not_taken_for_a_block_on_the_disk() -> None:
    world = DiskWorld(before=DiskWorld.holding(TEXT, host=32), host=32)
    world.fetched("shorter", TEXT[:5])
    index = LayeredIndex(world.pool.index, [world.lower])
    slots = [cast("SlotId", index.get(key)) for key in keys_of(TEXT, world.groups[0])[:2]]
    assert slots == [0, -1]
    assert [key for key, _, _ in index.on_tiers(slots)] == [key_at(TEXT, 8)]


def test_an_arrival_fetches_no_block_that_is_on_the_device_or_host() -> None:
    world = DiskWorld.holding(TEXT, OTHER, host=32)
    world.serve("on the device", TEXT)
    world.settle()
    before = len(fetches(world))
    world.add("late", TEXT)
    assert len(fetches(world)) == before


def test_an_arrival_fetches_blocks_that_follow_a_device_hit() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    [block] = world.device.hand_out(1)
    world.device.name(block, key_at(TEXT, 4))
    world.add("late", TEXT)
    assert fetches(world)[-1].blocks == 2


@pytest.mark.parametrize(("least", "answer"), [(4, None), (5, 0)])
def test_only_fetched_tokens_count_toward_the_break_even(least: int, answer: int | None) -> None:
    world = DiskWorld(before=DiskWorld.holding(TEXT, host=32), host=32)
    world.only_on_host(TEXT)
    world.rot(0, world.pool.index[key_at(TEXT, 4)])
    corrupt = world.add("corrupt", TEXT[:5])
    world.admit(corrupt)
    world.step_and_copy()
    world.end(corrupt)
    assert (world.on_host(TEXT), world.below(TEXT)) == (".xxx", "xxx.")
    world.least_from[Tier.DISK] = least
    assert world.lookup(world.add("late", TEXT)) == answer


@pytest.mark.parametrize("group", [window(6, group=1), recurrent(group=1)])
def test_an_arrival_fetches_window_blocks_and_states(group: GroupSpec) -> None:
    world = DiskWorld.holding(TEXT, groups=(full(), group), host=64, disk=64)
    before = len(fetches(world))
    request = world.add("late", TEXT)
    assert len(fetches(world)) == before + 1
    world.copy_all()
    assert world.admit(request)
    assert len(fetches(world)) == before + 1


def test_a_request_that_ends_before_its_lookup_cancels_its_fetch() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    request = world.add("late", TEXT)
    world.end(request)
    assert world.copied(LOAD, TierOutcome.CANCELLED) == 3
    assert world.idle_step().below == ()
    assert world.copies == {}
    assert world.below(TEXT) == "xxx."


def test_a_submitted_fetch_is_cancelled_and_its_blocks_are_not_found() -> None:
    world = DiskWorld.holding(TEXT, ranks=2, host=32)
    request, job = world.fetching()
    world.end(request)
    assert world.idle_step().cancelled == (job,)
    assert world.idle_step().cancelled == ()
    world.report(0, job)
    assert world.count(SlotState.DRAINING) == 3
    world.report(1, job)
    assert (world.on_host(TEXT), world.below(TEXT)) == ("....", "xxx.")
    assert world.count(SlotState.DRAINING) == 0


def test_a_fetch_that_another_request_waits_for_continues() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    first, second = world.add("first", TEXT), world.add("second", TEXT)
    assert world.lookup(second) is None
    world.end(first)
    assert world.idle_step().cancelled == ()
    world.finish()
    assert world.admit(second) == 12


def test_a_request_waits_once_for_the_fetches_of_others() -> None:
    text = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    world = DiskWorld.holding(text, host=64)
    for blocks in range(1, 9):
        world.add(f"{blocks} blocks", text[: 4 * blocks + 1])
    assert [each.blocks for each in fetches(world)] == [1] * 8
    request = world.add("late", text)
    assert world.lookup(request) is None
    world.idle_step()
    for job in world.tier_jobs(LOAD)[:-1]:
        world.report(0, job)
        assert world.lookup(request) is None
    assert len(world.reported(LookupDeferred)) == 1
    world.finish()
    assert world.admit(request) == 32


def test_a_fetch_continues_after_its_request_was_admitted() -> None:
    world = DiskWorld.holding(TEXT, host=32)
    hasty = world.add("hasty", TEXT)
    world.admit(hasty, may_wait=False)
    world.step()
    world.end(hasty)
    world.finish()
    assert world.copied(LOAD) == 3


@pytest.mark.parametrize(("least", "reads_cache", "count"), [(12, True, 1), (13, True, 0), (0, False, 0)])
def test_an_arrival_fetches_no_hit_it_may_not_load(least: int, reads_cache: bool, count: int) -> None:
    world = DiskWorld.holding(TEXT, host=32, least=least)
    request = world.add("late", TEXT, reads_cache=reads_cache)
    assert len(fetches(world)) == count
    assert world.lookup(request) == (None if count else 0)


@pytest.mark.parametrize(("least", "answer"), [(12, None), (13, 0)])
def test_a_lookup_fetches_no_hit_shorter_than_the_measured_minimum(least: int, answer: int | None) -> None:
    world = DiskWorld.holding(TEXT, host=32)
    world.least_from[Tier.DISK] = 13  # so that the request's arrival starts no fetch
    world.lookup(world.add("first", "unknown"))
    request = world.add("late", TEXT)
    world.least_from[Tier.DISK] = 0
    assert world.lookup(request, least=least) is answer


# -- before any request -----------------------------------------------------------------------------------------


def restarted(*texts: str, host: int = 16, disk: int = 32, **settings: bool) -> DiskWorld:
    """Return the next engine on the disk of an engine that left these texts there."""
    first = DiskWorld.holding(*texts, host=16, disk=disk)
    return DiskWorld(before=first, host=host, disk=disk, **settings)


def test_a_restart_fetches_the_most_recently_used_blocks() -> None:
    world = restarted(TEXT, OTHER)
    world.settle()
    assert (world.on_host(TEXT), world.on_host(OTHER)) == ("x...", "xxx.")
    assert {each.request for each in fetches(world)} == {None}
    assert world.admit(world.add("late", OTHER)) == 12


def test_a_warm_start_keeps_the_eviction_order_of_host_and_disk() -> None:
    world = restarted(TEXT, OTHER, disk=6)
    world.settle()
    world.serve_twice("0123456789abcdef")
    assert (world.below(TEXT), world.below(OTHER)) == ("....", "xxx.")
    while world.on_host(OTHER) == "xxx.":
        assert world.on_host(TEXT) in ("x...", "....")
        name = f"filler{len(world.log)}"
        world.serve(name, f"{len(world.log):04}?")
    assert world.on_host(TEXT) == "...."
    assert world.on_host(OTHER) == "xx.."


def test_r15_a_warm_start_does_not_fetch_a_prefix_that_a_request_has_looked_up() -> None:
    world = restarted(TEXT, OTHER, host=32)
    world.end(world.add("late", TEXT))
    world.settle()
    assert (world.on_host(TEXT), world.on_host(OTHER)) == ("....", "xxx.")


def test_a_warm_start_evicts_nothing() -> None:
    world = restarted(TEXT, host=4, opens=False)
    world.serve("other", OTHER)
    world.open()
    world.settle()
    assert (world.on_host(OTHER), fetches(world)) == ("xxxx", [])
    world.device.forget_keys()
    world.empty_host()
    assert fetches(world) == []


def test_a_warm_start_waits_for_loads_and_requests_fetches() -> None:
    world = restarted(TEXT, OTHER, host=32)
    world.add("late", TEXT)
    for _ in range(2):
        world.idle_step()
        assert len(world.tier_jobs(LOAD)) == 1
    world.settle()
    assert world.on_host(OTHER) == "xxx."


def test_a_warm_start_waits_until_host_memory_is_ready() -> None:
    world = restarted(TEXT, host=4, is_growing=True)
    world.idle_step()
    assert fetches(world) == []
    world.ready_up_to(16)
    world.settle()
    assert world.on_host(TEXT) == "xxx."


def test_r10_a_reset_ends_the_warm_start() -> None:
    world = restarted(TEXT)
    assert world.core.tier_store.is_due
    world.reset()
    assert not world.core.tier_store.is_due
    world.settle()
    assert fetches(world) == []


# -- limits on a fetch's size -------------------------------------------------------------------------------------


NO_OWNER = cast("Owner[Spill]", None)


def ended(tier: LowerTier, number: int, *, last: int = 0, is_load_open: bool = False) -> float:
    """End a spill; return the new limit on blocks per spill."""
    slots = list(map(SlotId, range(16)))
    job = Spill(NO_OWNER, slots, [], keys=[], tier_slots=[], id=JobId(number), copy_s=1.0)
    tier.spill_ended(job, JobId(max(last, number)), is_load_open=is_load_open)
    return tier.limit.share


def test_a_spill_holds_at_most_64_mib_and_an_eighth_of_the_host() -> None:
    tier = DiskTier(1, Jobs(1), [Rank(0)])
    tier.rank_reported(Rank(0), 2**20, works=True)
    assert (tier.spill_slots(10_000), tier.spill_slots(80), tier.spill_slots(1)) == (64, 10, 1)
    tier.slot_bytes = 2**30
    assert tier.spill_slots(10_000) == 1


def test_a_load_during_spills_halves_the_spill_limit_once() -> None:
    tier = DiskTier(1, Jobs(1), [Rank(0)])
    assert ended(tier, 0, last=3, is_load_open=True) == 1 / 2
    assert ended(tier, 3, is_load_open=True) == 1 / 2
    assert [ended(tier, number, is_load_open=True) for number in (4, 5, 6)] == [1 / 4, 1 / 8, 1 / 8]
    assert ended(tier, 7) == 1 / 4


def test_spills_that_overlap_with_loads_hold_fewer_slots() -> None:
    world = DiskWorld(host=64, disk=64)
    texts = [letter * 33 for letter in "abcd"]
    world.fails()
    for text in texts:
        world.serve(f"{text} once", text)
        world.serve(f"{text} again", text, drains=False)
    world.fails(works=True)
    job = world.start_job(STORE)
    assert len(world.copies[job].job.slots) == 8
    world.device.forget_keys()
    world.admit(world.add("loads", texts[0]))
    world.idle_step()
    world.report(0, job)
    world.finish()
    assert len(world.copies[world.start_job(STORE)].job.slots) == 4
