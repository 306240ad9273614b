from __future__ import annotations

from itertools import product

import pytest

from kvoffload.core.jobs import Leases, Offer
from kvoffload.core.machine import SlotState
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, MissCause, StoreOutcome
from kvoffload.model.events import BlocksZeroed
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId
from kvoffload.model.wire import Direction
from tests.core.world import DONE, FAILED, TEXT, Req, World, cached, full, key_at, window


def side_by_side(world: World) -> tuple[Req, Req]:
    """Return two requests that computed one prompt into separate blocks.

    The second request's offers wait for the first request's stores.
    """
    one, two = world.admitted("one", TEXT), world.admitted("two", TEXT)
    for request in (one, one, one, two, two, two):
        world.step(request)
    return one, two


def stored_blocks(world: World) -> list[DeviceBlockId]:
    return [block for job in world.open_jobs(Direction.STORE) for block in world.copies[job].blocks]


def offer(world: World, *blocks: tuple[BlockKey, DeviceBlockId]) -> None:
    """Offer blocks without a request, as the lazy planner does."""
    world.core.stores.offer([Offer((key,), (block,)) for key, block in blocks], last_chance=True)
    world._settle()


def named(world: World, *keys: BlockKey) -> list[DeviceBlockId]:
    """Allocate device blocks for these keys, as if they were computed; return the blocks."""
    blocks = world.device.hand_out(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        world.device.name(block, key)
        world.device.bytes[0][block] = key
        world.device_age[block] = 0
    return blocks


# -- R3: a block whose store is open ----------------------------------------------------------------------------


def test_r3_a_prefix_that_two_requests_compute_is_stored_once() -> None:
    world = World()
    first = world.computed()
    under_way = stored_blocks(world)
    assert len(under_way) == 3
    second = world.computed("b")  # The second request's device hit covers the first request's blocks.
    assert second.tables[0][:3] == first.tables[0][:3]
    for _ in range(3):
        world.idle_step()
    assert stored_blocks(world) == under_way
    world.finish()
    assert world.stores() == {StoreOutcome.STORED: 3, StoreOutcome.IN_FLIGHT: 3}
    world.computed("c")
    assert world.open_jobs() == []
    assert world.stores()[StoreOutcome.ALREADY_CACHED] == 3


def test_r3_a_block_is_not_stored_again_until_every_rank_of_a_failed_store_has_ended() -> None:
    world = World(ranks=2)
    first = world.computed()
    world.report_all(0, FAILED)
    second = world.computed("b")
    assert second.tables[0][:3] == first.tables[0][:3]
    for job in world.open_jobs():
        # no new copy starts: the other rank is still reading the blocks
        assert world.copies[job].running == {1}
    world.device.forget_keys()
    world.admitted("c", TEXT)
    assert world.miss() is MissCause.STORE_FAILED
    world.finish()
    world.end(second)  # after its end, a request can no longer offer its blocks
    world.drain()
    assert world.stores()[StoreOutcome.FAILED] == 3


def test_r3_a_block_that_an_abandoned_load_may_still_write_is_not_stored() -> None:
    world = cached()
    world.loading()
    (load,) = world.open_jobs(Direction.LOAD)
    block, key = world.copies[load].blocks[0], BlockKey(b"computed again")
    world.overdue(load)
    world.device.name(block, key)
    offer(world, (key, block))
    world.idle_step()
    assert stored_blocks(world) == []


@pytest.mark.parametrize("copy_ends", [True, False])
def test_r3_an_offer_that_waited_for_a_copy_is_stored_at_its_requests_end(copy_ends: bool) -> None:
    world = World(ranks=2)
    world.computed()
    world.report_all(0, FAILED)
    second = world.computed("b")
    if copy_ends:
        world.finish()
    world.end(second)
    if not copy_ends:
        assert world.stores() == {StoreOutcome.FAILED: 6}
    world.drain()
    assert world.on_host(TEXT) == ("xxx" if copy_ends else "...")


@pytest.mark.parametrize("how", ["fails", "is abandoned", "fails after the duplicate's request"])
def test_r3_a_duplicate_is_stored_when_the_first_store_fails(how: str) -> None:
    world = World()
    one, two = side_by_side(world)
    mine, others = one.tables[0][:3], two.tables[0][:3]
    assert set(mine).isdisjoint(others)
    assert stored_blocks(world) == mine
    assert not any(world.device.leased[block] for block in others)
    if how == "fails after the duplicate's request":
        world.end(two)
    for job in world.open_jobs():
        if how == "is abandoned":
            world.overdue(job)
        else:
            world.finish(job, outcome=FAILED)
    assert world.core.has_work
    world.idle_step()
    assert stored_blocks(world)[-3:] == others
    assert not world.core.state.requests.finishing
    world.finish()
    assert world.on_host(TEXT) == "xxx"


def test_r3_a_duplicate_that_no_longer_has_the_key_is_not_stored() -> None:
    world = World(device=16)
    _, two = side_by_side(world)
    world.end(two)
    world.computed("greedy", "0123456789" * 4 + "01234")  # This request is allocated the blocks of `two`.
    world.finish(*[job for job in world.open_jobs() if job < 3], outcome=FAILED)
    world.drain()
    assert world.on_host(TEXT) == "..."
    assert world.stores()[StoreOutcome.STALE] + world.stores().get(StoreOutcome.NOT_HASHED, 0) == 3


def test_r3_a_key_offered_twice_at_once_is_stored_once() -> None:
    world = World()
    key = key_at("abcd", 4)
    one, two = named(world, key, key)
    offer(world, (key, one), (key, two))
    world.submit()
    world.finish()
    assert world.stores() == {StoreOutcome.STORED: 1, StoreOutcome.IN_FLIGHT: 1}


@pytest.mark.parametrize("host", [1, 2])
def test_r3_a_duplicate_is_stored_when_the_first_block_is_declined(host: int) -> None:
    world = World(host=host)
    head, tail = key_at(TEXT, 4), key_at(TEXT, 8)
    wrong, right, deeper = named(world, key_at("wxyz", 4), head, tail)
    offer(world, (head, wrong), (head, right), (tail, deeper))
    world.submit()
    assert stored_blocks(world) == [right, deeper][:host]
    world.finish()
    full_up = {StoreOutcome.HOST_FULL: 1} if host == 1 else {}
    assert world.stores() == {StoreOutcome.STALE: 1, StoreOutcome.STORED: host, **full_up}
    assert world.eviction_order() == [tail, head][-host:]


def test_r3_a_duplicate_waits_for_a_slot_when_the_first_block_got_none() -> None:
    world = World(device=24, host=0)
    one, two = world.admitted("one", TEXT), world.admitted("two", TEXT)
    for _ in range(3):
        world.step()
    for request in (one, two):
        assert len(world.core.state.requests.live[request.name].waiting) == 3
    world.ready_up_to(2)
    world.end(two)
    world.idle_step()
    assert stored_blocks(world) == two.tables[0][:2]


def test_r3_a_request_does_not_inherit_the_offers_of_an_earlier_request_with_its_name() -> None:
    world = World(device=12)  # stores may lease three blocks, as many as one request has
    _, two = side_by_side(world)
    world.end(two)
    world.overdue(*world.open_jobs())
    again = world.admitted("two", TEXT)
    world.step(again)
    world.step(again)
    record = world.core.state.requests.live[again.name]
    assert world.stores() == {StoreOutcome.ABANDONED: 3, StoreOutcome.STALLED: 3}
    # the offers wait, because copies of the same blocks still run
    assert list(record.waiting) == [(0, 0), (0, 1), (0, 2)]


def test_r15_cached_keys_are_marked_as_used_once_with_the_head_last() -> None:
    world = World()
    keys = [key_at(TEXT, end) for end in (4, 8)]
    states = tuple(zip(keys, named(world, *keys), strict=True))
    offer(world, *states)
    world.submit()
    world.finish()
    (again,) = named(world, keys[0])
    for duplicate in ((), ((keys[0], again),)):
        offer(world, *states, *duplicate)
        assert world.eviction_order() == keys[::-1]
    assert world.stores() == {StoreOutcome.STORED: 2, StoreOutcome.ALREADY_CACHED: 5}


# -- R4: ranks --------------------------------------------------------------------------------------------------


def test_r4_a_slot_can_hit_only_when_every_rank_has_confirmed() -> None:
    world = World(ranks=3)
    world.computed()
    for rank in (2, 0):
        for job in world.open_jobs():
            world.report(rank, job)
        assert world.on_host(TEXT) == "..."
        assert world.count(SlotState.FILLING) == 3
    world.report_all(1)
    assert world.on_host(TEXT) == "xxx"


def test_r4_a_rank_that_confirms_twice_or_late_changes_nothing() -> None:
    world = World(ranks=2)
    world.computed("a", TEXT[:5])
    (job,) = world.open_jobs()
    world.report(0, job)
    world.repeat_report(0)
    assert world.on_host(TEXT[:4]) == "."
    world.report(1, job)
    assert world.on_host(TEXT[:4]) == "x"
    world.repeat_report(0)
    world.repeat_report(1)


def test_r4_a_failed_rank_invalidates_a_slot_which_is_empty_only_after_all_ranks_have_ended() -> None:
    world = World(ranks=3)
    world.computed("a", TEXT[:5])
    (job,) = world.open_jobs()
    (block,) = stored_blocks(world)
    world.report(0, job)
    world.report(1, job, FAILED)
    assert world.stores() == {StoreOutcome.FAILED: 1}
    assert (world.count(SlotState.DRAINING), world.count(SlotState.FILLING)) == (1, 0)
    assert world.device.leased[block] == 1
    world.report(2, job, DONE)
    assert world.count(SlotState.EMPTY) == world.ready
    assert world.device.leased[block] == 0
    assert world.on_host(TEXT[:4]) == "."


def test_r4_a_failed_rank_of_a_load_invalidates_its_slots_while_others_read_them() -> None:
    world = cached(ranks=2)
    world.loading()
    (job,) = world.open_jobs()
    world.report(1, job, FAILED)
    assert world.on_host(TEXT) == "..."
    assert world.count(SlotState.DRAINING) == 3
    world.report(0, job)
    assert world.count(SlotState.EMPTY) == world.ready


def test_invalidating_a_draining_slot_keeps_a_newer_slots_index_entry() -> None:
    # Regression: after a reset, a slot being emptied kept its old key. Invalidating this slot again removed
    # the index entry of a newer slot with the same key.
    world = cached(ranks=2)
    world.loading()
    (job,) = world.open_jobs()
    world.reset()
    world.computed("b", TEXT)
    world.finish(*[each for each in world.open_jobs() if each != job])
    assert world.on_host(TEXT) == "xxx"
    world.finish(job, outcome=FAILED)
    assert world.on_host(TEXT) == "xxx"


# -- R5: leases and pins ----------------------------------------------------------------------------------------


def test_r5_stores_lease_no_more_than_a_quarter_of_the_device() -> None:
    world = World(device=32)  # stores may lease a quarter, 8 blocks
    request = world.computed(text="0123456789" * 8)
    assert len(stored_blocks(world)) == 8
    world.step()
    assert len(stored_blocks(world)) == 8
    world.finish()
    world.step()
    assert len(stored_blocks(world)) == 8  # the offers that waited for free slots are now stored
    world.finish()
    world.end_and_drain(request)
    assert world.on_host("0123456789" * 8) == "x" * 20


def test_r5_an_offer_that_still_waits_for_leases_at_its_requests_end_is_declined() -> None:
    world = World(device=32)
    world.end(world.computed(text="0123456789" * 8))
    assert world.stores() == {StoreOutcome.LEASE_LIMIT: 12}
    world.drain()
    assert world.on_host("0123456789" * 8) == "x" * 8 + "." * 12
    assert world.next_miss("0123456789" * 8) is MissCause.DECLINED_LEASE_LIMIT


def test_r5_offers_of_ended_requests_do_not_keep_waiting() -> None:
    # Regression: with copies that never end, offers waiting for free slots were kept forever, even after
    # their requests had ended.
    world = World(device=32)
    for number in range(5):
        world.end(world.computed(f"r{number}", f"{number}bcdefghi" * 4))
    assert not world.core.stores.for_room


def test_r5_a_leased_block_is_not_allocated_after_its_request_ended() -> None:
    world = World(device=16)
    request = world.computed()
    under_way = stored_blocks(world)
    world.end(request)
    assert all(world.device.leased[block] == 1 for block in under_way)
    for number in range(3):  # `DevicePool` checks that leased blocks are not allocated.
        hungry = world.admitted(f"r{number}", str(number) * 40)
        world.run(hungry)
        world.end(hungry)
    for job in [job for job in world.open_jobs() if set(world.copies[job].blocks) & set(under_way)]:
        world.finish(job)
    assert not any(world.device.leased[block] for block in under_way)


def test_r5_a_filling_slot_is_not_evicted() -> None:
    world = World(host=3)
    world.computed()
    assert world.count(SlotState.FILLING) == 3
    other = world.computed("b", "0123456789")
    world.end(other)
    assert world.stores() == {StoreOutcome.HOST_FULL: 2}
    world.drain()
    assert world.on_host(TEXT) == "xxx"


def leave(world: World, request: Req, how: str, outcome: CopyOutcome) -> None:
    """Let a request with open copies end, be preempted, time out or be reset; then end the copies."""
    if how == "ended":
        world.end(request)
    elif how == "preempted":
        world.preempt(request)
    elif how == "reset":
        world.reset()
    else:
        world.overdue(*world.open_jobs())
    world.idle_step()
    for job in list(world.copies):
        world.finish(job, outcome=outcome)


def storing(world: World, stage: str) -> Req:
    request = world.admitted("a", TEXT[:9])
    world.step()
    if stage == "planned":  # The step's job also contains another request's last offers.
        other = world.admitted("b", "01234")
        world.step(other)
        world.end(other)
    else:
        world.step()
    return request


def loading(world: World, stage: str) -> Req:
    return world.admitted("a", TEXT) if stage == "planned" else world.loading()


@pytest.mark.parametrize("outcome", [DONE, FAILED])
@pytest.mark.parametrize(
    ("copy", "leaves"),
    [
        *product(["store"], ["ended", "preempted", "abandoned", "reset"]),
        *product(["load"], ["ended", "abandoned", "reset"]),
    ],
)
@pytest.mark.parametrize("stage", ["planned", "submitted", "one rank"])
def test_r5_leases_and_pins_are_released_once(
    stage: str, copy: str, leaves: str, outcome: CopyOutcome
) -> None:
    world = World(ranks=2) if copy == "store" else cached(ranks=2)
    request = (storing if copy == "store" else loading)(world, stage)
    if stage == "one rank":
        world.report(0, world.open_jobs()[0])
    leave(world, request, leaves, outcome)
    world.drain()
    assert [name for name, _ in world.results] == (["a"] if copy == "load" else [])
    assert world.device.leased.total() == 0
    assert not world.pool.pins


def test_r5_releasing_twice_is_an_error_and_changes_nothing() -> None:
    world = World()
    block, other = world.device.hand_out(2)
    leases = Leases(world.device)
    leases.take([block])
    with pytest.raises(KeyError):
        leases.release([block, other])
    assert leases.counts == {block: 1}
    leases.release([block])
    with pytest.raises(KeyError):
        leases.release([block])
    assert world.device.leased[block] == 0
    world.serve("first", TEXT)
    slots = tuple(world.pool.index.values())
    world.pool.pin(slots)
    world.pool.unpin(slots)
    with pytest.raises(KeyError):
        world.pool.unpin(slots)
    assert world.count(SlotState.READY) == 3


def test_r5_leased_blocks_are_released_deepest_first() -> None:
    world = World()
    request = world.computed(text=TEXT[:9])
    blocks = request.tables[0][:2]
    world.end(request)
    world.finish()
    assert [block for block in world.device.free if block in blocks] == blocks[::-1]


# -- R7: window blocks that are allocated again ----------------------------------------------------------------


def first_row(world: World, request: Req) -> list[DeviceBlockId]:
    """Return the core's record of the request's block table, for the first group."""
    table = world.core.state.requests.live[request.name].table
    assert table is not None
    return table[0]


def reused(world: World, request: Req) -> list[int]:
    """Return the positions that the core has zeroed in a request's table."""
    return [position for position, block in enumerate(first_row(world, request)) if block == NULL_BLOCK]


def test_r7_a_reallocated_window_block_is_offered_only_for_its_new_position() -> None:
    world = World(window(5), device=4, host=0)
    # With a window, blocks are reused, so the request can have more blocks than the device.
    request = world.computed(text="abcdefghijklmnopqrstuvwxyz")
    assert reused(world, request) == [0, 1, 2]
    world.ready_up_to(8)
    world.end(request)  # a block that got no slot is offered again when its request ends
    world.drain()
    assert world.on_host("abcdefghijklmnopqrstuvwx") == "...x.."
    assert world.stores() == {StoreOutcome.STALE: 3, StoreOutcome.STORED: 1, StoreOutcome.LEASE_LIMIT: 2}


def test_r7_a_window_block_of_an_idle_request_is_zeroed_in_the_step_that_reallocates_it() -> None:
    world = World(window(5), device=8, host=0)
    sleeps = world.admitted("sleeps", "abcdefghijklmnop")
    while sleeps.computed < 16:
        world.step(sleeps)
    world.step(sleeps)  # The first blocks of `sleeps` leave the window.
    assert reused(world, sleeps) == []
    busy = world.admitted("busy", "0123456789" * 2)
    while not reused(world, sleeps):
        world.step(busy, tokens=4)
        assert world.reported(BlocksZeroed) or world.steps < 20
    assert sum(event.blocks for event in world.reported(BlocksZeroed)) == len(reused(world, sleeps))
    for position in reused(world, sleeps):
        assert sleeps.tables[0][position] == NULL_BLOCK


@pytest.mark.parametrize("how", ["allocation", "copy target"])
def test_r7_reused_block_ids_include_allocations_and_copy_targets(how: str) -> None:
    world = World(window(5), device=8, host=0)
    request = world.computed(text="abcdefghijklm")
    row = first_row(world, request)
    left = row[0]
    assert left in world.device.free
    world.device.free.move_to_end(left, last=False)
    if how == "copy target":
        world.tell(facts.StepScheduled(99, reallocated=(left,)))
    else:
        world.admit(world.add("b", "01234"))
    assert row[0] == NULL_BLOCK


def test_r7_a_zeroed_position_is_stored_from_the_devices_block_with_its_key() -> None:
    world = World(window(5), device=16, host=0)
    one, two = world.admitted("one", TEXT), world.admitted("two", TEXT)
    for _ in range(4):
        world.step(one, tokens=4)
        world.step(two, tokens=4)
    row, copy = first_row(world, one), first_row(world, two)[0]
    assert row[0] != copy
    world.device.free.move_to_end(row[0], last=False)
    world.admit(world.add("c", "0"))
    assert row[0] == NULL_BLOCK
    world.ready_up_to(8)
    world.end(one)
    world.submit()
    assert copy in stored_blocks(world)


def test_r10_a_zeroed_position_is_not_stored_from_a_block_from_before_a_reset() -> None:
    world = World(window(5), device=16, host=0)
    old = world.admitted("old", TEXT)
    for _ in range(4):
        world.step(old, tokens=4)
    block = first_row(world, old)[0]
    world.reset()
    world.device.forget_keys()
    new = world.admitted("new", TEXT)
    for _ in range(4):
        world.step(new, tokens=4)
    row = first_row(world, new)
    world.device.free.move_to_end(row[0], last=False)
    world.admit(world.add("c", "0"))
    assert row[0] == NULL_BLOCK
    world.device.forget_keys()
    world.device.name(block, key_at(TEXT, 4))
    world.ready_up_to(8)
    world.end(new)
    world.submit()
    assert block not in stored_blocks(world)


def test_r7_a_block_whose_hash_is_not_the_key_is_not_stored() -> None:
    world = World()
    request = world.admitted("a", TEXT)
    world.step()
    world.device.name(request.tables[0][0], key_at("wrong", 4))
    world.step_and_copy()
    assert world.on_host(TEXT) == ".x."
    assert world.stores() == {StoreOutcome.STALE: 1, StoreOutcome.STORED: 1}


@pytest.mark.parametrize("is_after_reset", [False, True])
def test_r7_a_block_whose_hash_is_unknown_is_not_stored(is_after_reset: bool) -> None:
    world = World()
    if is_after_reset:
        world.reset()
    world.device.keys_of = lambda blocks: [None] * len(blocks)  # type: ignore[method-assign]
    world.computed()
    assert world.stores() == {StoreOutcome.NOT_HASHED: 3}


# -- R8: evictions are reported ---------------------------------------------------------------------------------------


def evict(world: World, name: str, text: str) -> None:
    """Fill the host's slots with another request's store, then let the store fail, so that the slots are empty."""
    other = world.admitted(name, text)
    world.step(other)
    world.step(other)
    world.finish(outcome=FAILED)
    world.end(other)


def after_an_eviction() -> tuple[World, Req]:
    """Return a world whose host has lost the blocks that its running request found there."""
    world = World(host=2)
    world.serve("first", "abcdefghi")
    request = world.computed(text="abcdefghi")
    assert world.stores()[StoreOutcome.ALREADY_CACHED] == 2
    evict(world, "b", "012345678")
    assert world.on_host("abcdefgh") == ".."
    return world, request


def test_r8_a_block_evicted_in_the_middle_of_a_request_is_stored_again() -> None:
    world, request = after_an_eviction()
    world.step(request)
    world.finish()
    assert world.on_host("abcdefgh") == "xx"
    assert world.stores()[StoreOutcome.STORED] == 4


def test_r8_a_request_stores_an_evicted_block_again_only_once() -> None:
    world, request = after_an_eviction()
    world.step(request)
    world.finish(outcome=FAILED)
    world.device.forget_keys()
    world.serve("again", "abcdefghi")
    assert world.on_host("abcdefgh") == "xx"
    evict(world, "c", "987654321")
    world.step(request)
    world.finish()
    assert world.on_host("abcdefgh") == ".."


def test_r8_a_request_that_offers_an_evicted_block_again_stores_it_only_once() -> None:
    world, request = after_an_eviction()
    world.step(request)
    world.finish(outcome=FAILED)
    world.preempt(request)
    world.serve("again", "abcdefghi")
    world.admit(request)
    world.run(request)  # The request offers all its blocks again, although the host already has them.
    world.finish()
    world.end(request)
    stores = world.stores()
    evict(world, "c", "987654321")
    world.drain()
    assert world.stores()[StoreOutcome.STORED] == stores[StoreOutcome.STORED]


def test_r8_a_block_is_stored_again_beside_a_request_that_has_already_done_so() -> None:
    world = World(host=2)
    world.serve("first", "abcdefghi")
    early, _ = world.computed("early", "abcdefghi"), world.computed("stays", "abcdefghi")
    evict(world, "b", "012345678")
    world.step(early)
    world.finish()
    world.end(early)
    late = world.computed("late", "abcdefghi")
    evict(world, "c", "987654321")
    assert world.on_host("abcdefgh") == ".."
    world.step(late)
    world.finish()
    assert world.on_host("abcdefgh") == "xx"


def test_r8_requests_with_one_prefix_share_its_watch_until_the_last_of_them_ends() -> None:
    world = World(host=3)
    world.serve("first", TEXT)
    requests = [world.computed(name, TEXT) for name in "abc"]
    watches = world.core.stores.evictions.watches
    for request in requests:
        assert (len(watches), watches.others) == (3, {})
        world.end(request)
    assert not watches


@pytest.mark.parametrize("first", [0, 1, 2])
def test_r8_requests_that_share_only_a_part_of_a_prefix_watch_it_until_the_last_of_them_ends(
    first: int,
) -> None:
    world = World(host=5)
    prompts = ["abcd0123e", "abcd4567e", "abcd0123e"]
    for number, prompt in enumerate(prompts[:2]):
        world.serve(f"first{number}", prompt)
    requests = [world.computed(name, prompt) for name, prompt in zip("abc", prompts, strict=True)]
    watches = world.core.stores.evictions.watches
    assert (len(watches), [*map(len, watches.others.values())]) == (3, [1])
    for request in requests[first:] + requests[:first]:
        assert len(watches) >= 2
        world.end(request)
    assert (len(watches), watches.others) == (0, {})


def test_r8_each_request_that_shares_only_a_part_of_a_prefix_offers_it_again() -> None:
    world = World(host=2)
    prompts = ["abcde", "abcd4567e"]
    for prompt in prompts:
        world.serve(prompt, prompt)
    requests = [world.computed(name, prompt) for name, prompt in zip("ab", prompts, strict=True)]
    evict(world, "c", "012345678")
    assert world.on_host("abcd") == "."
    world.step(*requests)
    world.finish(outcome=FAILED)
    world.step(*requests)
    world.finish()
    assert world.on_host("abcd") == "x"


@pytest.mark.parametrize("how", ["stored", "hit"])
def test_r8_a_block_is_not_stored_over_a_slot_that_a_running_request_stored_or_hit(how: str) -> None:
    world = World(host=2) if how == "stored" else cached(host=2, text="abcdefghi")
    stays = world.admitted("stays", "abcdefghi")
    world.load_and_run(stays)
    world.finish()
    world.end_and_drain(world.computed("b", "012345678"))
    assert world.on_host("abcdefgh") == "xx"
    assert world.stores()[StoreOutcome.HOST_FULL] == 2
    assert world.next_miss("012345678") is MissCause.DECLINED_HOST_FULL
    world.end(stays)
    world.serve("c", "012345678")
    assert world.on_host("012345678") == "xx"


def test_r8_blocks_that_found_the_host_full_are_stored_at_their_requests_end() -> None:
    world = World(host=2)
    one = world.computed(text="abcdefghi")
    world.finish()
    two = world.computed("b", "012345678")
    world.end(one)
    world.end_and_drain(two)
    assert world.on_host("012345678") == "xx"


def test_r8_two_requests_that_wait_for_one_key_watch_it() -> None:
    world = World(host=2)
    one, two = world.admitted("one", "abcdefghi"), world.admitted("two", "abcdefghi")
    for _ in range(2):
        world.step_and_copy()
    assert world.stores()[StoreOutcome.IN_FLIGHT] == 2
    world.end(one)
    evict(world, "c", "012345678")
    assert world.on_host("abcdefgh") == ".."
    world.step(two)
    world.finish()
    assert world.on_host("abcdefgh") == "xx"


# -- R15: the order of eviction ---------------------------------------------------------------------------------


def squeeze(world: World, blocks: int) -> None:
    """Store this many blocks of other texts."""
    world.serve(f"x{world.steps}", (f"{world.steps:<9}" * 9)[: 4 * blocks + 1])


LONG = "abcdefghijklmnopq"


def make_used(world: World, how: str) -> None:
    request = world.add("again", LONG)
    if how == "found on the device":
        world.admit(request)
        world.run(request)
    else:
        world.device.forget_keys()
        assert world.lookup(request) == 16
        if how == "loaded":
            world.allocate(request, 16)
            world.step_and_copy()
    world.end_and_drain(request)
    world.device.forget_keys()


@pytest.mark.parametrize("how", ["stored", "looked up", "loaded", "found on the device"])
def test_r15_the_least_recently_used_block_is_evicted_first_and_a_prefixs_head_last(how: str) -> None:
    world = World(host=8)
    world.serve("first", LONG)
    if how != "stored":
        world.serve("between", "0123456789abcdefg")
        make_used(world, how)
        squeeze(world, 4)
        assert world.on_host("0123456789abcdefg") == "...."
    else:
        squeeze(world, 4)
    assert world.on_host(LONG) == "xxxx"
    for left in ("xxx.", "xx..", "x...", "...."):
        squeeze(world, 1)
        assert world.on_host(LONG) == left


@pytest.mark.parametrize("how", ["stored", "looked up", "loaded"])
def test_r15_depth_counts_across_groups(how: str) -> None:
    # Regression: slots were released group by group, so one group's head was evicted before another's tail.
    world = World(full(), full(group=1), host=8)
    world.serve("first", LONG)
    if how != "stored":
        make_used(world, how)
    depths = list(map(len, world.eviction_order()))
    assert depths == sorted(depths, reverse=True)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_r15_stores_that_no_running_request_holds_arrive_deepest_first(policy: str) -> None:
    # Regression: the lazy planner stored the deepest block first, so the host evicted heads first.
    world = World(device=24, policy=policy)
    # the planner stores all blocks of this text in one step
    text = "bcdefghi" if policy == "eager" else "bcdefghijklmnopq"
    for number in range(8):
        request = world.computed(f"r{number}", f"{number}{text}")
        world.step(request)
        world.preempt_and_step(request)
        world.end_and_drain(request)
    order = world.eviction_order()
    prefixes = {key[:1] for key in order}
    assert len(prefixes) > 2
    for prefix in prefixes:
        depths = [len(key) for key in order if key[:1] == prefix]
        assert depths == sorted(depths, reverse=True)


def heads_last(world: World) -> bool:
    depths = [len(key) for key in world.eviction_order() if key.startswith(LONG[:4].encode())]
    return len(depths) > 1 and depths == sorted(depths, reverse=True)


@pytest.mark.parametrize("groups", [1, 2])
def test_r15_a_head_found_on_the_device_is_as_recent_as_its_tail(groups: int) -> None:
    # Regression: the head was marked as used when the request began, and the tail was stored later, so the
    # head was evicted first.
    world = World(*[full(group=group) for group in range(groups)])
    world.serve("first", LONG[:9])
    request = world.add("again", LONG)
    assert world.admit(request) == 0
    assert request.brought == (8, 0)
    world.run(request)
    world.finish()
    world.end_and_drain(request)
    assert world.on_host(LONG) == "xxxx"
    assert heads_last(world)


@pytest.mark.parametrize("how", ["runs", "ends", "loses its blocks"])
def test_r15_recomputed_blocks_are_marked_as_used_with_the_head_last(how: str) -> None:
    # Regression: each step marked its confirmed blocks as used, so the head was the least recently used.
    world = cached(text=LONG)
    request = world.add("again", LONG)
    world.lookup(request)
    world.allocate(request, 0)
    world.run(request)
    if how == "ends":
        world.end(request)
    elif how == "loses its blocks":
        world.preempt_and_step(request)
    assert world.on_host(LONG) == "xxxx"
    assert heads_last(world)


def tail_looked_up(world: World) -> Req:
    """Return a request whose tail is pinned on the host, and whose head is on the device."""
    world.only_on_host(LONG)
    world.serve("head", LONG[:9])
    request = world.add("again", LONG)
    assert world.lookup(request) == 8
    assert world.device_hit(request) == 8
    return request


@pytest.mark.parametrize("accepted", [0, 4])
def test_r15_a_declined_tail_after_a_device_hit_is_released_before_its_head(accepted: int) -> None:
    # Regression: the lookup pinned only the tail, whose release made the tail more recent than the head.
    world = World()
    world.allocate(tail_looked_up(world), accepted)
    assert heads_last(world)


@pytest.mark.parametrize(
    "when", ["it was looked up", "it was looked up again", "it is allocated", "it loads", "it has loaded"]
)
def test_r15_a_tail_whose_request_ends_is_released_before_its_head(when: str) -> None:
    world = World()
    request = tail_looked_up(world)
    if when == "it was looked up again":
        squeeze(world, 1)
        world.lookup(request)
    elif when != "it was looked up":
        world.allocate(request, 8)
    if when in ("it loads", "it has loaded"):
        world.step()
    if when == "it has loaded":
        world.finish()
    world.end_and_drain(request)
    assert heads_last(world)


def test_r15_a_tail_without_its_head_is_released() -> None:
    world = World()
    request = tail_looked_up(world)
    for key in list(world.pool.index):
        if len(key) < 16:
            world.lose(key)
    world.end(request)
    assert world.on_host(LONG) == "..xx"


def test_r15_holds_of_quarantined_slots_are_released() -> None:
    world = World()
    world.serve("first", LONG[:9])
    request = world.computed("again", LONG)
    world.finish()
    tail = world.pool.index[key_at(LONG, 16)]
    world.blocks_on_host -= world.pool.quarantine(tail)
    world.end_and_drain(request)
    assert world.on_host(LONG) == "xxx."
    assert heads_last(world)
    assert not world.pool.holds


def test_r15_a_tail_that_arrives_after_a_preemption_is_not_used_later_than_its_head() -> None:
    # Regression: the preemption released the head before the tail, so the head was evicted first.
    world = World()
    request = world.computed(text=LONG)
    head, *_ = world.open_jobs()
    world.finish(head)
    assert world.open_jobs()
    world.preempt(request)
    world.copy_all()
    assert world.on_host(LONG) == "xxxx"
    assert heads_last(world)


def test_r15_a_tail_that_arrives_for_a_new_table_is_not_used_later_than_a_head_of_the_old_one() -> None:
    world = World(step_tokens=4)
    request = world.admitted("a", TEXT)
    for _ in range(4):
        world.step()
    head, tail, stuck = world.open_jobs()
    world.finish(head)
    world.overdue(stuck)  # The timeout releases the slots that the request holds.
    world.preempt_and_step(request)
    world.device.forget_keys()
    world.admit(request, accept=0)
    world.step()
    world.step()
    world.finish(tail)
    world.preempt_and_step(request)
    assert world.eviction_order() == [key_at(TEXT, 8), key_at(TEXT, 4)]


def test_r15_stores_that_end_in_another_order_leave_the_head_to_be_evicted_last() -> None:
    world = World()
    request = world.computed(text=LONG)
    for job in reversed(world.open_jobs()):
        world.finish(job)
    world.end(request)
    assert world.on_host(LONG) == "xxxx"
    assert heads_last(world)


def test_r15_the_head_is_evicted_last_after_a_load_and_a_late_store_of_the_earlier_table() -> None:
    world = World(step_tokens=4)
    request = world.computed(text=LONG)
    head, *others, last = world.open_jobs()
    world.finish(head)
    world.overdue(last)  # The timeout releases the request's slots together with its block table.
    world.preempt_and_step(request)
    world.device.forget_keys()
    world.admit(request)
    world.step()
    (load,) = world.open_jobs(Direction.LOAD)
    world.finish(*others)  # The middle blocks are stored for the new block table before its head is loaded.
    world.finish(load)
    world.preempt_and_step(request)
    assert world.on_host(LONG) == "xxx."
    assert heads_last(world)


def test_r15_a_head_stored_after_its_tail_is_evicted_last() -> None:
    world = World(host=1, step_tokens=4)
    world.computed("holds", "01234")
    world.finish()
    request = world.admitted("a", TEXT)
    for _ in range(2):
        world.step(request)
    # The head waits for a slot, because blocks stored by `holds` fill the host.
    assert world.core.state.requests.live[request.name].waiting
    world.ready_up_to(2)
    world.step(request)
    world.finish()
    assert world.on_host(TEXT) == ".x."
    world.ready_up_to(4)
    world.end_and_drain(request)
    assert world.on_host(TEXT) == "xxx"
    assert heads_last(world)
