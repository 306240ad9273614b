from __future__ import annotations

import sys
from collections.abc import Callable

from kvoffload.core.machine import SlotState
from kvoffload.core.tiers import MOST_ASKED
from kvoffload.model import facts
from kvoffload.model.causes import MissCause, TierOutcome
from kvoffload.model.events import LookupDeferred
from kvoffload.model.ids import BlockKey, JobId
from kvoffload.model.wire import Direction, Tier
from tests.core.remote_world import RemoteWorld
from tests.core.world import FAILED, Req, World, full, keys_of

LOAD, STORE = Direction.LOAD, Direction.STORE
# Four blocks; a lookup returns at most three, because the engine must compute the last token.
TEXT = "abcdefghijklmnop"


def two(**settings: int) -> tuple[RemoteWorld, RemoteWorld]:
    """Return two engines that share a remote tier, to which the first engine has written a text."""
    first = RemoteWorld(**settings)  # type: ignore[arg-type]  # of the world
    first.share(TEXT)
    return first, RemoteWorld(store=first.store, **settings)  # type: ignore[arg-type]


def test_only_blocks_found_again_are_written_and_each_only_once() -> None:
    world = RemoteWorld()
    world.serve("once", TEXT)
    world.drain()
    assert world.in_store(TEXT) == "...."
    world.share(TEXT)
    assert world.in_store(TEXT) == "xxx."
    assert world.copied(STORE) == 3
    world.share(TEXT)
    assert world.copied(STORE) == 3


def test_another_engine_finds_a_block_and_does_not_write_it_again() -> None:
    _, other = two(ranks=2)
    request = other.add("late", TEXT)
    assert other.lookup(request) is None
    assert other.reported(LookupDeferred)[-1] == LookupDeferred(request.name, None)
    other.idle_step()
    other.finish()
    assert other.admit(request) == 12
    other.load_and_run(request)
    other.end(request)
    other.drain()
    other.share(TEXT)
    assert other.copied(LOAD) == 3
    assert other.copied(STORE) == 0


def test_a_remote_hit_shorter_than_its_break_even_is_computed() -> None:
    _, other = two()
    other.least_from = {Tier.DISK: 1000, Tier.REMOTE: 13}
    other.lookup(other.add("first", "unknown"))
    request = other.add("late", TEXT)
    assert other.admit(request) == 0
    assert other.miss() is MissCause.IN_REMOTE
    assert other.copied(LOAD) == 0
    other.least_from[Tier.REMOTE] = 12
    assert other.lookup(other.add("next", TEXT)) is None


def test_a_lookup_waits_until_the_remote_tier_has_answered() -> None:
    _, other = two()
    request = other.add("late", TEXT, answers=False)
    assert other.asked == [(request.name, tuple(keys_of(TEXT, full())), other.namespace)]
    assert other.lookup(request) is None
    assert other.remote_jobs(LOAD) == []
    # An answer without keys reports that the query could not be made.
    other.tell(facts.RemoteAnswered(request.name, other.remote.namespace))
    assert other.admit(request) == 0
    assert other.miss() is MissCause.NEVER_SEEN
    other.run(request)


def test_an_answer_after_its_request_has_ended_still_gives_hints() -> None:
    _, other = two()
    request = other.add("gone", TEXT, answers=False)
    other.end(request)
    other.answer()
    assert len(other.remote.pool.index) == 3


def test_r18_an_answer_to_a_query_from_before_a_reset_gives_no_hints() -> None:
    _, other = two()
    other.add("late", TEXT, answers=False)
    other.reset()
    other.answer()
    assert len(other.remote.pool.index) == 0


def test_a_repeated_answer_adds_no_second_hint() -> None:
    _, other = two()
    other.add("one", TEXT)
    other.add("two", TEXT)
    pool = other.remote.pool
    assert pool.capacity - pool.count(SlotState.EMPTY) == len(pool.index) == 3


def test_blocks_on_the_host_or_device_are_not_queried() -> None:
    world = RemoteWorld()
    world.serve("once", TEXT)
    world.add("again", TEXT, answers=False)
    assert world.asked == []
    world.add("longer", TEXT + "qrst", answers=False)
    assert [len(ask.keys) for ask in world.asked] == [1]


def test_the_number_of_queried_keys_is_limited() -> None:
    world = RemoteWorld()
    world.add("long", "x" * 4 * (MOST_ASKED + 10), answers=False)
    assert [len(ask.keys) for ask in world.asked] == [MOST_ASKED]


# -- failures ---------------------------------------------------------------------------------------------------


def test_r17_a_lost_value_loses_the_blocks_after_it_and_one_fetch() -> None:
    first, other = two(host=32)
    del first.store[first.remote.namespace, keys_of(TEXT, full())[1], 0]
    request = other.add("late", TEXT, answers=False)
    keys = tuple(keys_of(TEXT, full())[:3])
    # The remote tier reports keys that it does not have.
    other.tell(facts.RemoteAnswered(request.name, other.remote.namespace, keys))
    assert other.lookup(request) is None
    other.idle_step()
    other.finish()
    assert other.on_host(TEXT) == "x.x."
    assert other.admit(request) == 4
    assert (other.copied(LOAD), other.copied(LOAD, TierOutcome.FAILED)) == (2, 1)
    other.load_and_run(request)
    other.end(request)
    assert keys[1] not in other.remote.pool.index


def test_r4_r17_a_value_of_another_writer_on_one_rank_is_used_by_no_rank() -> None:
    first, other = two(host=32, ranks=2)
    first.overwrite(TEXT[:8], rank=1)
    request = other.fetched("late", TEXT)
    assert other.on_host(TEXT) == "x.x."
    assert (other.copied(LOAD), other.copied(LOAD, TierOutcome.CORRUPT)) == (2, 1)
    assert other.admit(request) == 4
    other.load_and_run(request)
    other.end(request)
    other.drain()


def test_r17_a_failed_fetch_makes_its_request_wait_only_once() -> None:
    _, other = two(host=32)
    request = other.add("late", TEXT)
    assert other.lookup(request) is None
    other.idle_step()
    [job] = other.remote_jobs(LOAD)
    other.report(0, job, FAILED)
    assert other.admit(request) == 0
    other.run(request)
    other.end(request)
    other.drain()


def test_r17_a_put_that_fails_leaves_no_hint() -> None:
    world, job, _ = putting()
    world.report(0, job)
    world.report(1, job, FAILED)
    assert len(world.remote.pool.index) == 0
    world.drain()


def test_r17_a_failing_store_is_neither_queried_nor_used_for_copies() -> None:
    for lose in (RemoteWorld.fails, lambda world: world.tell(facts.RemoteLost())):
        first, other = two(host=32)
        lose(other)
        lose(first)
        request = other.add("late", TEXT, answers=False)
        assert other.asked == []
        assert other.admit(request) == 0
        other.run(request)
        first.share("ABCDEFGHIJKLMNOP")
        assert "x" not in first.in_store("ABCDEFGHIJKLMNOP")


def test_r17_a_failing_store_adds_at_most_five_calls_to_a_lookup() -> None:
    def calls_of_lookup(world: World, request: Req) -> int:
        calls = 0

        def seen(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(seen)
        try:
            world.core.lookup(request.name, 0, may_wait=True)
        finally:
            sys.setprofile(None)
        return calls

    plain, lost = World(), RemoteWorld()
    lost.fails()
    without = calls_of_lookup(plain, plain.add("new", TEXT))
    assert calls_of_lookup(lost, lost.add("new", TEXT)) <= without + 5


def test_a_store_that_works_again_is_used() -> None:
    _, other = two(host=32)
    other.fails()
    other.fails(works=True)
    other.tell(facts.RemoteLost())
    other.tell(facts.RemoteOpened(other.remote.namespace))
    assert other.lookup(other.add("late", TEXT)) is None
    other.idle_step()
    assert len(other.remote_jobs(LOAD)) == 1


def test_a_store_that_has_not_connected_is_not_queried() -> None:
    world = RemoteWorld(is_reached=False)
    world.share(TEXT)
    assert (world.asked, world.store) == ([], {})


# -- resets and generations -------------------------------------------------------------------------------------


def test_r10_r18_nothing_from_before_a_reset_is_found_whichever_jobs_are_open() -> None:
    _, other = two(host=32)
    request = other.add("late", TEXT)
    other.lookup(request)
    other.idle_step()
    other.reset()
    other.finish()
    assert other.on_host(TEXT) == "...."
    assert other.admit(request) == 0
    other.run(request)
    other.end(request)
    other.drain()
    assert other.copied(LOAD) == 0
    other.add("too early", "a text that the host lacks", answers=False)
    assert other.asked == []
    other.tell(facts.RemoteOpened("print/its own"))
    assert len(other.remote.pool.index) == 0
    other.add("later", "another text, which the host lacks")
    assert len(other.remote.pool.index) == 0


def test_r18_a_put_that_runs_during_a_reset_gives_no_hint() -> None:
    world, _, _ = putting()
    world.reset()
    world.tell(facts.RemoteOpened("print/its own"))
    world.finish()
    assert len(world.remote.pool.index) == 0
    assert world.in_store(TEXT) == "...."


def putting() -> tuple[RemoteWorld, JobId, Callable[[], set[SlotState]]]:
    """Return a world whose two ranks are writing blocks to the remote tier, the job, and a function that
    returns the states of the host slots being written.
    """
    world = RemoteWorld(ranks=2)
    world.serve("once", TEXT)
    world.serve("again", TEXT, drains=False)
    world.idle_step()
    [job] = world.remote_jobs(STORE)
    slots = world.copies[job].job.slots
    return world, job, lambda: {world.core.state.pool.state(slot) for slot in slots}


def test_r18_after_a_reset_slots_of_a_put_are_filled_only_when_every_rank_has_read_them() -> None:
    world, job, states = putting()
    world.reset()
    assert states() == {SlotState.DRAINING}
    world.report(0, job)
    assert states() == {SlotState.DRAINING}
    world.report(1, job)
    assert states() == {SlotState.EMPTY}


def test_r4_slots_of_a_failed_put_are_not_evicted_until_all_ranks_have_read_them() -> None:
    world, job, states = putting()
    world.report(0, job, FAILED)
    assert states() == {SlotState.PINNED}
    world.report(1, job)
    assert states() == {SlotState.READY}


def test_r16_slots_of_a_put_that_a_rank_never_reports_are_not_allocated_again() -> None:
    world, job, states = putting()
    world.overdue(job)
    world.report(0, job)
    world.reset()
    assert states() == {SlotState.DRAINING}
    world.report(1, job)
    assert states() == {SlotState.EMPTY}


def test_r18_a_new_generation_drops_the_hints_of_the_previous_one() -> None:
    _, other = two(host=32)
    other.add("late", TEXT)
    assert len(other.remote.pool.index) == 3
    other.tell(facts.RemoteOpened("print/two"))
    assert len(other.remote.pool.index) == 0
    key = BlockKey(b"of the one before")
    other.tell(facts.RemoteAnswered(other.requests["late"].name, "print/one", (key,)))
    assert len(other.remote.pool.index) == 0
