from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.core.tiers import MOST_ASKED
from kvoffload.model import facts
from kvoffload.model.causes import MissCause, TierOutcome
from kvoffload.model.wire import Tier
from tests.core.lower_world import LOAD, OTHER, STORE, TEXT
from tests.core.remote_world import RemoteWorld, Value
from tests.core.world import GARBAGE, World, full, keys_of, window
from tests.operations import calls


def two(**settings: int) -> tuple[RemoteWorld, RemoteWorld]:
    """Return two engines that share a remote tier, to which the first engine has written a text."""
    first = RemoteWorld(**settings)  # type: ignore[arg-type]  # of the world
    first.share(TEXT)
    return first, RemoteWorld(store=first.store, **settings)  # type: ignore[arg-type]


def test_another_engine_finds_a_block_and_does_not_write_it_again() -> None:
    first, other = two(ranks=2)
    assert first.in_store(TEXT, rank=1) == "xxx."
    request = other.fetched("late")
    assert other.admit(request) == 12
    other.load_and_run(request)
    other.end_and_drain(request)
    other.share(TEXT)
    assert (other.copied(LOAD), other.copied(STORE)) == (3, 0)


def test_a_lookup_waits_until_the_remote_tier_has_answered() -> None:
    _, other = two()
    request = other.add("late", TEXT, answers=False)
    # The last block cannot be used, because the engine must compute the last token.
    assert other.asked == [(request.name, tuple(keys_of(TEXT, full())[:3]), other.namespace)]
    assert other.lookup(request) is None
    assert other.tier_jobs(LOAD) == []
    # An answer without keys reports that the query could not be made.
    other.tell(facts.TierAnswered(Tier.REMOTE, request.name, other.remote.namespace))
    assert other.admit(request) == 0
    assert other.miss() is MissCause.NEVER_SEEN
    other.run(request)


@pytest.mark.parametrize(("before", "hints"), [("the request ends", "xxx."), ("a reset", "....")])
def test_r18_a_late_answer_gives_hints_unless_a_reset_came_first(before: str, hints: str) -> None:
    _, other = two()
    request = other.add("gone", TEXT, answers=False)
    if before == "a reset":
        other.reset()
    else:
        other.end(request)
    other.answer()
    assert other.below(TEXT) == hints


def test_a_repeated_answer_adds_no_second_hint() -> None:
    _, other = two()
    other.add("one", TEXT)
    other.add("two", TEXT)
    pool = other.remote.pool
    assert pool.capacity - pool.count(SlotState.EMPTY) == len(pool.index) == 3


@pytest.mark.parametrize("place", ["host", "device"])
def test_blocks_on_the_host_or_device_are_not_queried(place: str) -> None:
    world = RemoteWorld(host=4)
    world.serve("once", TEXT)
    if place == "host":
        world.device.forget_keys()
    else:
        world.serve("another", OTHER)
    assert world.on_host(TEXT) == ("xxxx" if place == "host" else "....")
    world.add("again", TEXT + "q", answers=False)
    assert world.asked == []
    world.add("as long as its blocks", TEXT + "qrst", answers=False)
    assert world.asked == []  # its last token is computed, so its last block is
    world.add("longer", TEXT + "qrstu", answers=False)
    assert [ask.keys for ask in world.asked] == [(keys_of(TEXT + "qrst", full())[-1],)]


def test_with_several_groups_blocks_on_the_device_are_queried() -> None:
    groups = full(), window(8, group=1)
    world = RemoteWorld(*groups, host=8)
    world.serve("once", TEXT)
    world.serve("another", OTHER)
    assert world.on_host(TEXT) == "...."
    world.add("again", TEXT, answers=False)  # the device's hit may be shorter than what it has of a group
    assert [ask.keys for ask in world.asked] == [
        tuple(key for group in groups for key in keys_of(TEXT, group)[:3])
    ]


@pytest.mark.parametrize(("least", "asked"), [(12, 1), (13, 0)])
def test_a_request_that_is_too_short_for_a_fetch_queries_nothing(least: int, asked: int) -> None:
    world = RemoteWorld()
    world.least_from[world.TIER] = least
    world.lookup(world.add("first", "unknown"))
    world.add("second", TEXT, answers=False)
    assert len(world.asked) == asked


def test_a_model_with_a_draft_queries_one_block_after_the_last_usable_one() -> None:
    world = RemoteWorld(full(has_lookahead=True))
    world.add("late", TEXT, answers=False)
    assert [ask.keys for ask in world.asked] == [tuple(keys_of(TEXT, full()))]


def test_a_written_block_is_fetched_only_after_an_answer_has_confirmed_it() -> None:
    world = RemoteWorld.holding(TEXT, host=32)
    assert world.below(TEXT) == "xxx."
    world.store.clear()  # as if the tier had evicted the blocks after accepting them
    late = world.add("late", TEXT, answers=False)
    assert world.lookup(late) is None  # it waits for the answer only
    world.idle_step()
    assert world.tier_jobs(LOAD) == []
    world.answer()
    assert (world.admit(late), world.below(TEXT)) == (0, "....")
    world.run(late)
    world.end_and_drain(late)
    world.serve_again("again", TEXT)
    assert world.in_store(TEXT) == "xxx."


def test_a_written_block_is_not_fetched_if_its_query_fails() -> None:
    world = RemoteWorld.holding(TEXT, host=32)
    late = world.add("late", TEXT, answers=False)
    world.answer_one(0, "fails")
    assert world.admit(late) == 0
    world.run(late)


def test_a_request_fetches_nothing_that_only_an_earlier_answer_reported() -> None:
    _, other = two(host=32)
    other.end(other.add("first", TEXT, answers=False))
    other.answer()
    assert other.below(TEXT) == "xxx."
    other.store.clear()
    late = other.add("late", TEXT, answers=False)
    assert other.lookup(late) is None
    other.idle_step()
    assert other.tier_jobs(LOAD) == []
    other.answer()
    assert other.admit(late) == 0
    other.run(late)


def test_the_number_of_queried_keys_is_limited() -> None:
    world = RemoteWorld()
    world.add("long", "x" * 4 * (MOST_ASKED + 10), answers=False)
    assert [len(ask.keys) for ask in world.asked] == [MOST_ASKED]


# -- failures ---------------------------------------------------------------------------------------------------


def test_r17_a_lost_value_loses_the_blocks_after_it_and_one_fetch() -> None:
    first, other = two(host=32)
    del first.store[first.remote.namespace, keys_of(TEXT, full())[1], 0]
    request = other.add("late", TEXT, answers=False)
    other.answer_one(0, "lies")
    assert other.lookup(request) is None
    other.copy_all()
    assert other.on_host(TEXT) == "x.x."
    assert other.admit(request) == 4
    assert (other.copied(LOAD), other.copied(LOAD, TierOutcome.FAILED)) == (2, 1)
    other.load_and_run(request)
    other.end(request)
    assert other.below(TEXT)[1] == "."


def test_r4_blocks_that_a_full_store_refused_on_one_rank_are_not_found() -> None:
    world = RemoteWorld(ranks=2)
    job = world.spilling()
    world.report(0, job)
    world.report(1, job, takes=2)
    assert world.below(TEXT) == "xx.."
    assert world.remote.pool.count(SlotState.FILLING) == 0


def test_r4_r17_a_value_of_another_writer_on_one_rank_is_used_by_no_rank() -> None:
    first, other = two(host=32, ranks=2)
    first.store[first.remote.namespace, keys_of(TEXT, full())[1], 1] = Value(GARBAGE, 0)
    request = other.fetched("late")
    assert other.on_host(TEXT) == "x.x."
    assert (other.copied(LOAD), other.copied(LOAD, TierOutcome.CORRUPT)) == (2, 1)
    assert other.admit(request) == 4
    other.load_and_run(request)
    other.end_and_drain(request)


def lost(world: RemoteWorld) -> None:
    world.tell(facts.TierLost(Tier.REMOTE))


@pytest.mark.parametrize("lose", [RemoteWorld.fails, lost])
def test_r17_a_failing_store_is_not_used_until_it_works_again(lose: Callable[[RemoteWorld], None]) -> None:
    first, other = two(host=32)
    lose(other)
    lose(first)
    request = other.add("late", TEXT, answers=False)
    assert other.asked == []
    assert other.admit(request) == 0
    first.share(OTHER)
    assert "x" not in first.in_store(OTHER)
    other.fails(works=True)
    other.reach()
    assert other.lookup(other.add("next", TEXT)) is None


def test_a_store_that_has_not_connected_is_not_queried() -> None:
    world = RemoteWorld(is_reached=False)
    world.share(TEXT)
    assert (world.asked, world.store) == ([], {})


def test_r17_a_failing_store_adds_at_most_five_calls_to_a_lookup() -> None:
    plain, lost = World(), RemoteWorld()
    lost.fails()
    counts = []
    for world in (plain, lost):
        name = world.add("new", TEXT).name
        counts.append(calls(lambda: world.core.lookup(name, 0, may_wait=True)))  # noqa: B023
    assert counts[1] <= counts[0] + 5


# -- resets and generations -------------------------------------------------------------------------------------


def test_r18_after_a_reset_no_key_is_queried_until_there_is_a_new_generation() -> None:
    _, other = two(host=32)
    other.reset()
    other.add("too early", TEXT, answers=False)
    assert other.asked == []
    other.reach()
    assert other.below(TEXT) == "...."
    assert other.admit(other.add("later", TEXT)) == 0


def test_r18_a_new_generation_drops_the_hints_of_the_previous_one() -> None:
    _, other = two(host=32)
    other.add("late", TEXT)
    assert other.below(TEXT) == "xxx."
    other.tell(facts.TierOpened(Tier.REMOTE, "print/two"))
    assert other.below(TEXT) == "...."
    name, keys = other.requests["late"].name, tuple(keys_of(TEXT, full()))
    other.tell(facts.TierAnswered(Tier.REMOTE, name, "print/one", keys))
    assert other.below(TEXT) == "...."
