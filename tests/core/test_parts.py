"""Prefixes that are longer than the host: after the head, the rest is loaded in parts."""

from __future__ import annotations

import pytest

from kvoffload.core.jobs import Load
from kvoffload.model import facts
from kvoffload.model.causes import LoadOutcome, MissCause
from kvoffload.model.engine import Promises
from kvoffload.model.events import LoadEnded, LookupAnswered, PrefixExceedsHost
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import JobId, RequestId
from tests.core.each_tier import CAUSES, LONG, Kind, next_engine, on_each_tier, rounds, wait_for_rounds
from tests.core.lower_world import LOAD, LowerWorld
from tests.core.remote_world import RemoteWorld
from tests.core.world import CORRUPT, FAILED, Req, full, key_at, keys_of


def in_parts(kind: Kind, ranks: int = 1) -> tuple[LowerWorld, Req]:
    """Return an engine with 16 host slots, and an admitted request with 21 blocks on the tier."""
    world = next_engine(kind, LONG, host=16, ranks=ranks)
    request = wait_for_rounds(world, world.add("late", LONG))
    assert request.brought == (0, 84)
    return world, request


def fetching_part(kind: Kind, ranks: int = 1) -> tuple[LowerWorld, Req, JobId]:
    """Return such an engine and request, and the open fetch of the first part after the head."""
    world, request = in_parts(kind, ranks=ranks)
    world.copy_all()
    return world, request, world.start_job(LOAD)


def head_on_host(kind: Kind) -> tuple[LowerWorld, Req]:
    """Return an engine whose lookups have fetched what fits the host, and the request of these lookups."""
    world = next_engine(kind, LONG, host=16)
    request = world.add("late", LONG)
    while world.copied(LOAD) < 16:
        assert world.lookup(request) is None
        world.copy_all()
    return world, request


@on_each_tier
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prefix_longer_than_the_host_is_loaded_whole_and_each_block_is_read_once(
    kind: Kind, ranks: int
) -> None:
    world, request = in_parts(kind, ranks=ranks)
    head = len(rounds(world))
    world.load_and_run(request)
    assert world.results == [("late", True)]
    assert rounds(world)[head:] == [2, 2, 1]
    assert world.copied(LOAD) == 21
    assert world.loads() == {LoadOutcome.LOADED: 21}
    world.end_and_drain(request)
    # The head stays, so that the next request fetches only the rest.
    assert world.on_host(LONG[:56]) == "x" * 14
    assert world.reported(PrefixExceedsHost) == []
    world.device.forget_keys()
    world.load_and_run(wait_for_rounds(world, world.add("next", LONG)))
    assert world.copied(LOAD) < 2 * 21


@on_each_tier
@pytest.mark.parametrize("host", [1, 3])
def test_a_host_of_a_few_slots_is_enough_for_a_long_prefix(kind: Kind, host: int) -> None:
    world = next_engine(kind, LONG, host=host)
    request = wait_for_rounds(world, world.add("late", LONG))
    world.load_and_run(request)
    assert (world.results, request.brought) == ([("late", True)], (0, 84))
    world.end_and_drain(request)


@on_each_tier
def test_all_tokens_of_a_long_prefix_count_as_found_on_their_tier(kind: Kind) -> None:
    world, _ = in_parts(kind)
    [answer] = world.reported(LookupAnswered)
    assert (answer.hit_tokens, answer.miss_tokens, answer.cause) == (84, 1, MissCause.PARTIAL_BLOCK)
    assert dict(answer.fetched) == {world.TIER: 84}


@on_each_tier
@pytest.mark.parametrize(
    ("groups", "recovers", "found"),
    [((full(),), False, 64), ((full(), full(group=1)), True, 48)],
    ids=["failures", "groups"],
)
def test_of_a_prefix_that_cannot_be_loaded_in_parts_the_head_is_found_and_the_first_is_reported(
    kind: Kind, groups: tuple[GroupSpec, ...], recovers: bool, found: int
) -> None:
    count, promises = len(groups), Promises(recovers_loads=recovers)
    texts = LONG, LONG[::-1]
    world = next_engine(kind, *texts, host=16 * count, blocks=128, groups=groups, promises=promises)
    for number, text in enumerate(texts):
        request = wait_for_rounds(world, world.add(f"late{number}", text))
        assert request.brought == (0, found)
        assert world.miss() is CAUSES[kind]
        world.load_and_run(request)
        world.end_and_drain(request)
    assert world.reported(PrefixExceedsHost) == [
        PrefixExceedsHost(RequestId("late0"), 21 * count, 16 * count)
    ]


@on_each_tier
def test_a_request_that_may_not_wait_gets_the_head(kind: Kind) -> None:
    world, request = head_on_host(kind)
    assert world.admit(request, may_wait=False) == 64


@on_each_tier
def test_a_rest_that_is_too_short_to_be_fetched_is_computed(kind: Kind) -> None:
    world, request = head_on_host(kind)
    world.least_from[world.TIER] = 24
    assert world.admit(request) == 64


@on_each_tier
def test_after_a_failed_fetch_only_the_head_is_found(kind: Kind) -> None:
    world = next_engine(kind, LONG, host=16)
    request = world.fetched("late", LONG)
    assert world.lookup(request) is None
    world.finish(world.start_job(LOAD), outcome=FAILED)
    assert world.admit(request) == 16


@on_each_tier
def test_the_rest_of_a_long_prefix_counts_as_used_on_its_tier_while_the_request_waits_for_blocks(
    kind: Kind,
) -> None:
    world, request = head_on_host(kind)
    pool = world.lower.pool
    pool.use([pool.index[key] for key in keys_of(LONG[:64], full())])
    assert world.lookup(request) == 84
    used_last = [pool.key(slot) for slot in pool.order][-5:]
    assert used_last == keys_of(LONG, full())[:15:-1]


@on_each_tier
@pytest.mark.parametrize("accepted", [64, 60, 0])
def test_an_engine_may_decline_the_rest_of_a_long_prefix(kind: Kind, accepted: int) -> None:
    world = next_engine(kind, LONG, host=16)
    request = world.add("late", LONG)
    while world.admit(request, accept=accepted) is None:
        world.copy_all()
    fetches = len(rounds(world))
    world.load_and_run(request)
    world.end_and_drain(request)
    assert len(rounds(world)) == fetches
    assert sum(world.loads().values()) == accepted // 4


# -- endings ----------------------------------------------------------------------------------------------------------


def fails(world: LowerWorld, request: Req) -> None:
    """Check that the load is reported as failed once, and that the request then computes its tokens."""
    assert world.results == [("late", False)]
    assert world.reported(LoadEnded)[-1].outcome is not LoadOutcome.LOADED
    assert world.admit(request) == 0
    world.run(request)
    world.end_and_drain(request)
    assert world.results == [("late", False)]


@on_each_tier
@pytest.mark.parametrize("outcome", [FAILED, CORRUPT])
def test_r9_a_long_load_fails_if_the_fetch_of_a_part_fails(kind: Kind, outcome: object) -> None:
    world, request, job = fetching_part(kind, ranks=2)
    world.report(0, job)
    assert world.results == []
    world.report(1, job, outcome, (1,) if outcome is CORRUPT else ())  # type: ignore[arg-type]
    fails(world, request)


@on_each_tier
@pytest.mark.parametrize("outcome", [FAILED, CORRUPT])
@pytest.mark.parametrize("part", [0, 1, 3])
def test_r9_a_long_load_fails_if_the_load_of_a_part_fails(kind: Kind, part: int, outcome: object) -> None:
    world, request = in_parts(kind)
    for _ in range(2 * part):
        world.copy_all()
    world.idle_step()
    [job] = world.open_jobs(LOAD)
    assert isinstance(world.core.state.jobs.open[job], Load)
    world.report(0, job, outcome)  # type: ignore[arg-type]
    fails(world, request)


@on_each_tier
def test_r16_a_long_load_fails_if_a_part_is_overdue(kind: Kind) -> None:
    world, request, job = fetching_part(kind)
    world.overdue(job)
    fails(world, request)


@on_each_tier
def test_r16_a_long_load_fails_while_no_new_copy_may_start(kind: Kind) -> None:
    world, request, job = fetching_part(kind)
    world.core.state.stall.is_on = True  # as after several jobs that timed out
    world.finish(job)
    assert world.results == [("late", False)]
    world.core.state.stall.is_on = False
    fails(world, request)


@on_each_tier
def test_r10_a_reset_ends_a_long_load(kind: Kind) -> None:
    world, request, job = fetching_part(kind)
    world.reset()
    assert world.results == [("late", False)]
    world.finish(job)
    fails(world, request)


@on_each_tier
def test_r10_a_long_load_ends_after_the_part_that_is_loaded_during_a_reset(kind: Kind) -> None:
    world, request = in_parts(kind)
    world.idle_step()
    world.reset()
    assert world.results == []
    world.finish()
    fails(world, request)


def test_r10_after_a_reset_a_long_load_takes_no_later_blocks_behind_its_earlier_head() -> None:
    world, request = in_parts(RemoteWorld)
    assert isinstance(world, RemoteWorld)
    world.idle_step()
    world.reset()
    world.reach()
    RemoteWorld(store=world.store, namespace=world.namespace).share(LONG)
    world.add("other", LONG)  # the store says that it has the blocks
    world.finish()
    assert world.results == [("late", False)]
    for each in (world.requests["other"], request):
        world.end(each)
    world.drain()


def test_r18_a_long_load_ends_when_its_tier_gets_another_namespace() -> None:
    world, request, job = fetching_part(RemoteWorld)
    world.tell(facts.TierOpened(world.TIER, "another"))
    assert world.results == [("late", False)]
    world.finish(job)
    fails(world, request)


@on_each_tier
def test_r12_a_broken_invariant_ends_a_long_load(kind: Kind) -> None:
    world, request, job = fetching_part(kind)
    world.degrade()
    assert world.results == [("late", False)]
    world.finish(job)
    fails(world, request)


@on_each_tier
@pytest.mark.parametrize("steps", range(5))
def test_r11_a_request_may_end_during_each_part(kind: Kind, steps: int) -> None:
    world, request = in_parts(kind)
    for _ in range(steps):
        world.copy_all()
    world.idle_step()
    world.end(request)
    world.drain()
    assert [name for name, _ in world.results] == ["late"]


@on_each_tier
def test_r11_a_long_load_without_room_for_a_part_fails_at_once(kind: Kind) -> None:
    world, request = in_parts(kind)
    world.idle_step()
    other = world.add("other", LONG[:65])
    assert world.lookup(other, may_wait=False) == 64  # pins all slots
    world.finish()
    assert world.results == [("late", False)]
    world.end(other)
    fails(world, request)


@on_each_tier
@pytest.mark.parametrize("ends", [(76, 80), (80,)])
def test_r14_a_part_joins_a_fetch_of_its_blocks(kind: Kind, ends: tuple[int, ...]) -> None:
    world, request, job = fetching_part(kind)
    tier, keys = world.lower, [key_at(LONG, end) for end in ends]
    world.core.tier_store.fetches[tier].plan(keys, [tier.pool.index[key] for key in keys])
    world.finish(job)
    world.load_and_run(request)
    assert world.results == [("late", True)]
    assert world.copied(LOAD) == 21
    world.end_and_drain(request)


@on_each_tier
def test_r14_requests_with_the_same_long_prefix_wait_for_the_first(kind: Kind) -> None:
    world, request, _ = fetching_part(kind)
    other = world.add("other", LONG)
    assert world.lookup(other) is None
    world.load_and_run(request)
    assert (world.admit(other), other.brought) == (0, (84, 0))
    assert world.copied(LOAD) == 21
    for each in (request, other):
        world.end(each)
    world.drain()
