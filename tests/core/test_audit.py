"""Tests small parts of the core, and what the audit reports when nothing should be open."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from kvoffload.core.jobs import Leases, Owner, Spill, Store
from kvoffload.core.machine import SlotState
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.request import RequestRecord, Watch
from kvoffload.core.tally import MissMemory, Tally
from kvoffload.core.tiers import DiskTier
from kvoffload.model.causes import DegradeCause, EvictionCause, MissCause
from kvoffload.model.events import BlocksEvicted, BlocksOffered, OffloadingDegraded
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId, SlotId
from kvoffload.model.wire import Direction
from tests.core.audit import audit
from tests.core.below import disk_of
from tests.core.disk_world import DiskWorld
from tests.core.world import TEXT, DevicePool, World


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
    assert max(map(len, misses._causes)) == 1024
    assert misses.cause(keys[-2]) is misses.cause(keys[bound]) is MissCause.EVICTED
    assert misses.cause(keys[-1]) is MissCause.EVICTED
    assert misses.cause(keys[bound - 1]) is MissCause.NEVER_SEEN


# -- at rest ------------------------------------------------------------------------------------------------------

KEY = BlockKey(b"x")
RECORD = RequestRecord(RequestId("x"), 1, ())
LEFT: dict[str, Callable[[OffloadCore], object]] = {
    "slots in all states": lambda core: core.state.pool._counts.__setitem__(SlotState.EMPTY, 1),
    "keys of slots that can hit": lambda core: core.state.pool.index.parts[0].setdefault(KEY, SlotId(0)),
    "pins of slots": lambda core: core.state.pool.pin([SlotId(0)]),
    "slots that are FILLING, PINNED or DRAINING": lambda core: core.state.pool.reserve([KEY]),
    "slots that can be evicted": lambda core: core.state.pool.order.remove([SlotId(0)]),
    "slots that requests hold": lambda core: core.state.pool.hold([SlotId(0)]),
    "leases": lambda core: core.state.leases.take([DeviceBlockId(1)]),
    "ended requests": lambda core: core.state.requests.finishing.add(RECORD),
    "device blocks in tables": lambda core: core.state.tables.shared.setdefault(DeviceBlockId(1), []),
    "keys in flight": lambda core: core.stores.in_flight.keys.setdefault(KEY, Store(core.stores, [], [])),
    "offers without an outcome": lambda core: core.state.tally.offered(1),
    "slots that others wait for": lambda core: core.state.requests.loading.add((SlotId(0),), RECORD),
    "keys watched for eviction": lambda core: core.stores.evictions.watches.add((KEY,), Watch((KEY,))),
    "keys being written to the disk": lambda core: disk(core).in_flight.keys.setdefault(KEY, a_spill()),
    "blocks being read from the disk": lambda core: disk(core).pool.pin([*disk(core).pool.index.values()]),
    "filling slots of the disk": lambda core: disk(core).pool.reserve([KEY]),
}
"""For each total of the audit, what makes it wrong."""


def disk(core: OffloadCore) -> DiskTier:
    return disk_of(core.state)


def a_spill() -> Spill:
    return Spill(cast("Owner[Spill]", None), [], [], keys=[], tier_slots=[])


def is_at_rest(world: World) -> bool:
    return not (world.core.state.jobs.pending or world.core.state.requests.live)


@pytest.mark.parametrize("total", LEFT)
def test_the_audit_at_rest_reports_what_is_left(total: str) -> None:
    world = DiskWorld.holding(TEXT, host=16)
    assert is_at_rest(world)
    assert world.core.audit() == []
    LEFT[total](world.core)
    assert total in [problem.partition(": ")[0] for problem in world.core.audit()]


def test_at_rest_no_slot_is_scanned() -> None:
    world = DiskWorld.holding(TEXT, host=16)
    tier = disk(world.core)
    tier.has_block[next(iter(tier.pool.index.values()))] = 0
    assert audit(world.core) == ["2 slots of the disk have checksums, 3 can be found"]
    tier.has_block = None  # type: ignore[assignment]  # a look at it raises
    for pool in (world.pool, tier.pool):
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
    assert world.pool.pins
    assert world.core.audit() == []
