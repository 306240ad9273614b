"""Tests small parts of the core, and what the audit reports when nothing should be open."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from kvoffload.core.jobs import Leases, Spill, Store
from kvoffload.core.machine import SlotState
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.request import RequestRecord
from kvoffload.core.tally import MissMemory, Tally
from kvoffload.core.tiers import LowerTier
from kvoffload.model.causes import DegradeCause, EvictionCause, MissCause
from kvoffload.model.events import BlocksEvicted, BlocksOffered, OffloadingDegraded
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId, SlotId
from kvoffload.model.wire import Direction
from tests.core.audit import audit
from tests.core.disk_world import DiskWorld
from tests.core.world import DevicePool, World

TEXT = "abcdefghijklm"


def test_taken_events_do_not_include_later_events() -> None:
    tally = Tally(planned=())
    taken = tally.take()
    tally.events.append(OffloadingDegraded(DegradeCause.INVARIANT_BROKEN, "a test"))
    assert taken == []
    assert tally.events
    assert len(tally.take()) == 1
    assert (tally.events, tally.has_sums) == ([], False)
    assert tally.take() == []


def test_summed_events_wait_until_no_job_is_planned() -> None:
    planned: list[int] = [1]
    tally = Tally(planned)
    tally.offered(2)
    event = OffloadingDegraded(DegradeCause.INVARIANT_BROKEN, "a test")
    tally.events.append(event)
    assert tally.take() == [event]
    assert (tally.events, tally.has_sums) == ([], False)
    planned.clear()
    assert tally.take() == [BlocksOffered(2)]


def test_evicted_blocks_of_one_cause_are_reported_with_their_youngest_age() -> None:
    tally = Tally(planned=())
    for blocks, age_s in ((2, 5.0), (0, 0.0), (3, 4.0), (1, 6.0)):
        tally.evicted(EvictionCause.SPACE, blocks, age_s)
    assert tally.take() == [BlocksEvicted(6, EvictionCause.SPACE, 4.0)]


def test_a_block_that_is_leased_twice_takes_two_releases() -> None:
    device = DevicePool(2, 1)
    leases = Leases(device)
    leases.take([DeviceBlockId(1)])
    leases.take([DeviceBlockId(1)])
    leases.release([DeviceBlockId(1)])
    assert leases.counts == {1: 1}
    assert device.leased[DeviceBlockId(1)] == 1
    leases.release([DeviceBlockId(1)])
    assert leases.counts == {}


def test_the_memory_of_misses_is_bounded_and_forgets_the_oldest() -> None:
    misses = MissMemory(bound=2)
    keys = [BlockKey(bytes([number])) for number in range(3)]
    misses.note(keys[:2], MissCause.EVICTED)
    misses.note(keys[:1], MissCause.LOST)
    misses.note(keys[2:], MissCause.EVICTED)
    assert [misses.cause(key) for key in keys] == [MissCause.LOST, MissCause.NEVER_SEEN, MissCause.EVICTED]


def test_a_large_memory_of_misses_is_bounded_in_parts() -> None:
    misses, bound = MissMemory(), 65_536
    keys = [BlockKey(number.to_bytes(3, "little")) for number in range(2 * bound)]
    misses.note(keys, MissCause.EVICTED)
    misses.arrived(keys[-1:])
    assert max(map(len, misses._causes.values())) == 1024
    assert misses.cause(keys[-2]) is misses.cause(keys[bound]) is MissCause.EVICTED
    assert misses.cause(keys[-1]) is misses.cause(keys[bound - 1]) is MissCause.NEVER_SEEN


# -- at rest ------------------------------------------------------------------------------------------------------

AT_REST: dict[str, tuple[Callable[[OffloadCore], object], str]] = {
    "a slot in no count": (
        lambda it: it.state.pool._counts.__setitem__(SlotState.EMPTY, 1),
        "slots in all states: ",
    ),
    "a key that no slot has": (
        lambda it: it.state.pool.index.parts[0].__setitem__(BlockKey(b"x"), SlotId(0)),
        "keys of slots that can hit: 4 counted, 3 expected",
    ),
    "a pin without an owner": (lambda it: it.state.pool.pin((SlotId(0),)), "pins of slots: 1 counted, 0"),
    "a filling slot without a job": (
        lambda it: it.state.pool.reserve([BlockKey(b"x")]),
        "slots that are FILLING, PINNED or DRAINING: 1 counted, 0",
    ),
    "a slot that cannot be evicted": (
        lambda it: it.state.pool.order.remove([SlotId(0)]),
        "slots that can be evicted: 2 counted, 3",
    ),
    "a hold without a request": (
        lambda it: it.state.pool.hold((SlotId(0),)),
        "slots that requests hold: 1 counted",
    ),
    "a lease without a job": (
        lambda it: it.state.leases.take([DeviceBlockId(1)]),
        "leases: 1 counted, 0 expected",
    ),
    "a record of no job": (
        lambda it: it.state.requests.finishing.add(RequestRecord(RequestId("x"), 1, ())),
        "ended requests: 1 counted",
    ),
    "a table of no request": (
        lambda it: it.state.tables.shared.setdefault(DeviceBlockId(1), set()),
        "device blocks in tables: 1 counted",
    ),
    "a key of no job": (
        lambda it: it.stores.in_flight.keys.setdefault(BlockKey(b"x"), Store(it.stores, [], [])),
        "keys in flight: 1 counted",
    ),
    "an offer without an outcome": (lambda it: it.state.tally.offered(1), "offers without an outcome: 1"),
    "a slot that no request loads": (
        lambda it: it.state.requests.loading.setdefault(SlotId(0), []),
        "slots that others wait for: 1 counted",
    ),
    "a key that no request watches": (
        lambda it: it.stores.evictions.offers.setdefault(BlockKey(b"x"), {}),
        "keys watched for eviction: 1 counted",
    ),
}

ON_DISK: dict[str, tuple[Callable[[LowerTier], object], str]] = {
    "a key of no spill": (
        lambda it: it.in_flight.keys.setdefault(BlockKey(b"x"), cast("Spill", None)),
        "keys being written to the disk: 1 counted",
    ),
    "a pin of no fetch": (
        lambda it: it.pool.pin([next(iter(it.pool.index.values()))]),
        "blocks being read from the disk: 1 counted",
    ),
    "a filling slot of no spill": (
        lambda it: it.pool.reserve([BlockKey(b"x")]),
        "filling slots of the disk: 1 counted",
    ),
}


def is_at_rest(world: World) -> bool:
    return not (world.core.state.jobs.pending or world.core.state.requests.live)


def drained() -> World:
    world = World()
    world.serve("first", TEXT)
    assert is_at_rest(world)
    assert world.core.state.pool.count(SlotState.READY) == 3
    return world


@pytest.mark.parametrize("invariant", AT_REST)
def test_the_audit_at_rest_reports_what_is_left(invariant: str) -> None:
    breaks, reported = AT_REST[invariant]
    world = drained()
    assert world.core.audit() == []
    breaks(world.core)
    problems = world.core.audit()
    assert any(problem.startswith(reported) for problem in problems), problems


@pytest.mark.parametrize("invariant", ON_DISK)
def test_the_audit_at_rest_reports_what_disk_copies_have_left(invariant: str) -> None:
    breaks, reported = ON_DISK[invariant]
    world = DiskWorld.holding(TEXT, host=16)
    assert is_at_rest(world)
    disk = world.core.state.disk
    assert disk is not None
    assert world.core.audit() == []
    breaks(disk)
    problems = world.core.audit()
    assert any(problem.startswith(reported) for problem in problems), problems


def test_at_rest_no_slot_is_scanned() -> None:
    world = DiskWorld.holding(TEXT, host=16)
    disk = world.core.state.disk
    assert disk is not None
    disk.has_block[next(iter(disk.pool.index.values()))] = 0
    assert audit(world.core) == ["2 slots of the disk have checksums, 3 can be found"]
    disk.has_block = None  # type: ignore[assignment]  # a look at it raises
    for pool in (world.core.state.pool, disk.pool):
        pool._keys = None  # type: ignore[assignment]  # the same
        pool._states = bytearray(pool.capacity)
    assert world.core.audit() == []


def test_a_copy_that_timed_out_may_keep_its_leases_and_its_request_at_rest() -> None:
    world = World()
    first = world.admitted("first", TEXT)
    world.step(first)
    world.step(first)
    assert not is_at_rest(world)
    world.end(first)
    world.idle_step()
    for store in world.open_jobs(Direction.STORE):
        world.overdue(store)
    assert is_at_rest(world)
    assert world.core.state.requests.finishing
    assert world.core.state.leases.counts
    assert world.core.audit() == []


def test_a_spill_that_timed_out_may_keep_its_pins_at_rest() -> None:
    world = DiskWorld()
    world.serve("first", TEXT)
    world.serve("again", TEXT, drains=False)
    world.idle_step()
    (spill,) = world.tier_jobs(Direction.STORE)
    world.overdue(spill)
    assert is_at_rest(world)
    assert world.core.state.pool.pins
    assert world.core.audit() == []
