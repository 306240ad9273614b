from __future__ import annotations

import pytest

from kvoffload.core.machine import JobState, SlotState
from kvoffload.model.causes import (
    DegradeCause,
    EvictionCause,
    LoadOutcome,
    MissCause,
    RejectionCause,
    StoreOutcome,
)
from kvoffload.model.events import BlocksEvicted, FactRejected, JobAbandoned, OffloadingDegraded, ResetStarted
from kvoffload.model.wire import Direction, TransferPlan
from tests.core.fingerprint import fingerprint
from tests.core.world import FAILED, TEXT, Req, World, cached, full, key_at, left_behind, window


def computed(world: World, name: str = "a", text: str = TEXT) -> Req:
    request = world.add(name, text)
    world.admit(request, may_wait=False)
    world.load_and_run(request)
    return request


# -- R10: resets ------------------------------------------------------------------------------------------------


def test_r10_no_block_from_the_host_is_found_after_a_reset() -> None:
    world = World()
    world.serve("first", TEXT)
    world.reset()
    assert world.on_host(TEXT) == "..."
    assert world.reported(ResetStarted) == [ResetStarted(1, 3, 0, 0)]
    assert world.next_miss() is MissCause.AFTER_RESET


def test_r10_nothing_is_found_after_a_reset_with_open_lookups_stores_and_loads() -> None:
    world = cached(ranks=2)
    loads = world.admitted("loads", TEXT)
    plan = world.step()
    assert plan.loads
    asks = world.add("asks", TEXT)
    assert world.lookup(asks, may_wait=False) == 12
    stores = world.admitted("stores", "0123456789")
    world.step(stores)
    world.step(stores)
    world.report(0, world.open_jobs(Direction.STORE)[0])
    busy = [block for job in world.copies.values() for block in job.blocks]
    world.reset()
    assert world.reported(ResetStarted)[-1] == ResetStarted(1, 3, 5, 2)
    assert not world.pool.index
    assert world.core.state.jobs.pending
    assert all(world.device.leased[block] for block in busy)
    assert world.count(SlotState.DRAINING) == 5
    world.finish()
    assert world.results == [("loads", True)]
    assert not any(world.device.leased[block] for block in busy)
    assert world.count(SlotState.EMPTY) == world.ready
    assert not world.pool.index
    for request in (loads, stores):
        world.run(request)
        world.end(request)
    world.end_and_drain(asks)
    assert not world.pool.index
    assert not world.core.state.jobs.pending


def test_r10_a_reset_cancels_jobs_that_no_worker_has_received() -> None:
    world = World()
    request = world.admitted("a", "01234")
    world.step()
    world.end(request)
    world.reset()
    assert world.stores() == {StoreOutcome.CANCELLED: 1}
    assert world.device.leased.total() == 0
    assert world.submit() == TransferPlan()


def test_r10_a_reset_settles_waiting_offers() -> None:
    world = World(device=16, host=5)
    computed(world, text="0123456789" * 4)
    computed(world, "b", "9876543210" * 2)
    assert world.core.state.tally.open_offers > 0
    world.reset()
    assert world.core.state.tally.open_offers == 0
    assert world.stores()[StoreOutcome.BEFORE_RESET] > 0


def test_r10_a_reset_settles_blocks_that_would_be_offered_again() -> None:
    world = World()
    world.admitted("one", TEXT)
    world.admitted("two", TEXT)
    for _ in range(2):
        world.step()
    world.finish(outcome=FAILED)
    assert world.core.has_work  # the second request's offers are still waiting
    world.reset()
    assert world.stores() == {StoreOutcome.FAILED: 2, StoreOutcome.BEFORE_RESET: 2}
    assert not world.core.has_work


def test_r10_a_request_known_at_the_reset_stores_nothing_until_it_has_a_new_table() -> None:
    world = World()
    request = computed(world)
    world.reset()
    world.finish()
    for _ in range(8):
        world.step()
    assert world.open_jobs() == []
    assert world.stores() == {StoreOutcome.BEFORE_RESET: 5}
    world.preempt(request)
    world.device.forget_keys()
    world.admit(request)
    world.run(request)
    world.finish()
    assert world.on_host(TEXT) == "xxx"


@pytest.mark.parametrize("groups", [(full(),), (full(), window(5, group=1))])
def test_r10_blocks_that_follow_a_device_hit_from_before_the_reset_are_not_stored(groups: tuple) -> None:
    world = World(*groups)
    world.end(computed(world))
    world.finish()
    world.reset()
    # The prefix of `tainted` contains blocks computed before the reset.
    tainted = computed(world, "b", TEXT + "nopqrst")
    assert tainted.brought == (12, 0)
    world.end_and_drain(tainted)
    assert world.on_host(TEXT + "nopqrst") == "....."
    heir = computed(world, "c", TEXT + "nopqrst")  # The prefix of `heir` contains blocks of `tainted`.
    assert heir.brought[0] == 16
    world.end_and_drain(heir)
    assert not world.pool.index
    world.device.forget_keys()
    world.serve("d", TEXT)
    assert world.on_host(TEXT) == "xxx"


@pytest.mark.parametrize(("has_second", "found"), [(True, "....."), (False, "xxxxx")])
def test_r10_found_blocks_are_stored_unless_a_reset_came_between(has_second: bool, found: str) -> None:
    world = World(host=0)
    world.reset()
    world.end(computed(world))
    if has_second:
        world.reset()
    world.ready_up_to(8)
    heir = computed(world, "b", TEXT + "nopqrst")
    assert heir.brought == (12, 0)
    world.end_and_drain(heir)
    assert world.on_host(TEXT + "nopqrst") == found


def test_r10_blocks_that_follow_an_old_head_are_not_stored_even_if_the_hits_last_block_is_new() -> None:
    # Regression: only a device hit's last block was checked, but the index may return an older head.
    world = World()
    old = computed(world, text="abcde")
    world.end(old)
    world.finish()
    world.reset()
    skips = world.add("skips", TEXT)
    head = old.tables[0][0]
    # The head is computed again, so the device's index has two blocks with its key.
    world.device._forget_key(head)
    world.admit(skips)
    world.run(skips)
    world.end_and_drain(skips)
    key = key_at(TEXT, 4)
    newer = world.device.index.pop(key)
    world.device.index[key] = {head: None, **newer}
    world.device.keys[head] = key
    heir = computed(world, "heir", TEXT + "nopqrst")
    assert heir.tables[0][0] == head
    world.end(heir)
    world.drain()  # The world checks that no block from before the reset is used.
    assert world.on_host(TEXT + "nopqrst") == "xxx.."


def test_r10_blocks_watched_before_a_reset_are_not_offered_again() -> None:
    world = World(host=3)
    world.serve("first", TEXT)
    world.computed("watches", TEXT)
    assert len(world.core.stores.evictions.watches) == 3
    world.reset()
    assert not world.core.stores.evictions.watches
    world.device.forget_keys()
    world.serve("second", TEXT)
    offered = world.offered()
    world.device.forget_keys()
    world.serve("third", "0123456789abc")  # This request evicts the blocks that the second request stored.
    assert world.evicted() == 6
    assert world.offered() == offered + 3


# -- R11: when all has ended ------------------------------------------------------------------------------------


def test_r11_after_the_last_request_and_the_last_copy_nothing_is_kept() -> None:
    world = World(full(), window(5, group=1), ranks=2, device=40, host=6)
    requests = [world.add(f"r{number}", TEXT + str(number % 3) * 6) for number in range(6)]
    for request in requests:
        world.admit(request, may_wait=False)
        world.step()
    for job in world.open_jobs()[::2]:
        world.report(0, job, FAILED)
    world.preempt(requests[0])
    for request in requests:
        world.end_and_drain(request)
    assert left_behind(world.core) == {}
    capacity = world.pool.capacity
    assert world.count(SlotState.EMPTY) + world.count(SlotState.READY) == capacity
    assert world.device.held.total() == world.device.leased.total() == 0
    assert world.offered() == sum(world.stores().values())


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("ends", StoreOutcome.HOST_FULL),
        ("is preempted", StoreOutcome.LOST),
        ("is preempted and ends", StoreOutcome.REQUEST_GONE),
    ],
)
def test_r11_waiting_offers_of_a_request_are_settled(how: str, outcome: StoreOutcome) -> None:
    world = World(host=0)
    request = computed(world)
    if how != "ends":
        world.preempt(request)
    if how != "is preempted":
        world.end(request)
    world.idle_step()
    assert world.stores() == {outcome: 3}


def test_r11_a_request_preempted_before_its_first_step_loses_the_blocks_that_only_the_device_had() -> None:
    world = World()
    world.serve("first", TEXT)
    world.lose(key_at(TEXT, 8))
    request = world.add("second", TEXT)
    world.admit(request)
    world.preempt(request)
    world.lookup(request)
    assert world.stores() == {StoreOutcome.STORED: 3, StoreOutcome.LOST: 1}


def test_r11_the_next_lookup_notices_a_preemption() -> None:
    world = World(host=0)
    request = computed(world)
    world.preempt(request)
    world.admit(request)  # The request is admitted again before the step that reports its preemption.
    assert world.stores() == {StoreOutcome.LOST: 3}
    world.step()  # This step reports the preemption, which must not affect the new block table.
    assert world.core.state.requests.live[request.name].table is not None
    world.run(request)


def test_r11_a_store_of_an_earlier_table_does_not_affect_the_new_table() -> None:
    world = World(host=3)
    request = computed(world)
    world.preempt(request)
    world.copy_all()
    assert world.on_host(TEXT) == "xxx"
    assert not world.pool.holds


# -- R12: a broken invariant -----------------------------------------------------------------------------------


def test_r12_after_a_broken_invariant_no_job_starts_and_open_jobs_drain() -> None:
    world = cached(ranks=2)
    loads = world.admitted("loads", TEXT)
    world.step()
    stores = world.admitted("stores", "0123456789")
    world.step(stores)
    world.step(stores)
    pinned = world.add("pinned", TEXT)
    assert world.lookup(pinned, may_wait=False) == 12
    world.degrade()
    world.degrade()
    assert world.reported(OffloadingDegraded) == [OffloadingDegraded(DegradeCause.INVARIANT_BROKEN, "a test")]
    world.allocate(pinned, 12)
    assert world.results == [("pinned", False)]
    world.run(stores)
    assert len(world.open_jobs()) == 2
    world.finish()
    assert world.results[1:] == [("loads", False)]  # after an error, a load's bytes cannot be trusted
    assert world.on_host("0123456789") == ".."
    assert world.stores() == {StoreOutcome.STORED: 3, StoreOutcome.DEGRADED: 2}
    later = world.add("later", TEXT)
    assert world.admit(later) == 0
    assert world.miss() is MissCause.DEGRADED
    for request in (loads, pinned):
        assert world.admit(request) == 0
    for request in (loads, stores, pinned, later):
        world.run(request)
        world.end(request)
    assert world.open_jobs() == []
    assert not world.core.has_work
    assert world.stores()[StoreOutcome.DEGRADED] > 2


def test_r12_jobs_that_no_worker_has_received_are_cancelled() -> None:
    world = cached()
    other = world.admitted("b", "01234")
    world.step(other)
    world.end(other)
    world.admitted("a", TEXT)
    world.degrade()
    assert world.submit() == TransferPlan()
    assert world.results[-1] == ("a", False)


# -- R16: copies that never end ---------------------------------------------------------------------------------


def test_r16_a_store_that_never_ends_is_abandoned() -> None:
    world = World(ranks=2, device=32)
    request = computed(world)
    jobs = world.open_jobs()
    world.report_all(0)
    blocks = [block for job in jobs for block in world.copies[job].blocks]
    world.overdue(*jobs)
    world.overdue(*jobs)  # The second timeout of the same jobs must have no effect.
    assert [event.blocks for event in world.reported(JobAbandoned)] == [2, 1]
    assert world.stores() == {StoreOutcome.ABANDONED: 3}
    assert world.count(SlotState.QUARANTINED) == 3
    world.end(request)
    assert not world.core.has_work
    assert not world.core.state.jobs.pending
    assert all(world.device.leased[block] for block in blocks)
    assert world.core.state.jobs.count(Direction.STORE, JobState.ABANDONED) == 2


def test_r16_an_abandoned_stores_slots_are_never_allocated_again_even_if_it_ends_late() -> None:
    world = World(host=4)
    request = computed(world)
    jobs = world.open_jobs()
    slots = {slot for job in jobs for slot in world.copies[job].job.slots}
    world.overdue(*jobs)
    world.end(request)
    world.finish(*jobs)
    assert world.device.leased.total() == 0
    assert world.count(SlotState.QUARANTINED) == 3
    for number in range(3):
        world.serve(f"r{number}", str(number) * 5)
        assert slots.isdisjoint(world.pool.index.values())


def test_r16_a_load_that_never_ends_is_abandoned() -> None:
    world = cached()
    request = world.loading()
    (job,) = world.open_jobs()
    world.overdue(job)
    assert world.results == [("a", False)]
    assert world.loads() == {LoadOutcome.ABANDONED: 3}
    assert world.count(SlotState.QUARANTINED) == 3
    assert world.reported(BlocksEvicted)[-1] == BlocksEvicted(3, EvictionCause.ABANDONED)
    assert not world.core.has_work
    world.end(request)
    world.finish(job)
    assert world.results == [("a", False)]


def test_r16_a_copy_that_never_ends_is_abandoned_after_a_reset() -> None:
    world = World()
    computed(world)
    world.reset()
    world.overdue(*world.open_jobs())
    assert world.stores() == {StoreOutcome.BEFORE_RESET: 3}
    assert world.count(SlotState.QUARANTINED) == 3
    world.finish(*world.open_jobs())
    assert world.count(SlotState.QUARANTINED) == 3


def test_r16_a_request_with_a_stuck_copy_holds_no_slot_once_it_has_ended() -> None:
    world = World(host=8)
    request = computed(world)
    stuck, fine = world.open_jobs()
    world.overdue(stuck)
    world.finish(fine)
    assert world.pool.holds
    world.end(request)
    assert not world.pool.holds


def test_r16_slots_of_an_ended_request_are_released_despite_a_stuck_copy() -> None:
    world, text = World(host=8), TEXT + "nopqrstuvwxy"
    request = computed(world, text=text)
    arrived, stuck, late = world.open_jobs()
    world.finish(arrived)
    world.end(request)
    assert world.pool.holds
    world.overdue(stuck)
    assert not world.pool.holds
    world.finish(late)
    assert world.on_host(text) == "xx..xx"
    assert not world.pool.holds


def test_r16_a_job_that_has_ended_or_was_not_submitted_is_not_abandoned() -> None:
    world = cached()
    world.admitted("a", TEXT)
    before = fingerprint(world.core)
    for job in (0, 1, 2, 99):
        world.overdue(job)  # type: ignore[arg-type]
    assert fingerprint(world.core) == before
    assert RejectionCause.UNKNOWN_JOB not in [event.cause for event in world.reported(FactRejected)]
