"""Checks the core's counts and indexes, by recomputing them from the core's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from kvoffload.core.audit import totals, totals_at_rest, wrong
from kvoffload.core.claims import Claimant, Claims, Key
from kvoffload.core.host import HostState
from kvoffload.core.jobs import DeviceJob, Fetch, Job, Load, Spill, Store
from kvoffload.core.machine import JobState, RequestState, SlotState
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.request import RequestRecord
from kvoffload.core.slots import SlotPool
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.model.ids import NULL_BLOCK, SlotId
from kvoffload.model.wire import Direction, Tier
from tests.core.below import disk_of

if TYPE_CHECKING:
    from kvoffload.runtime.scheduler_side import SchedulerSide

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_WITHOUT_KEY = (SlotState.EMPTY, SlotState.QUARANTINED)
_OPEN = (JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED)
_HAS_TABLE = (RequestState.LOADING, RequestState.RUNNING)


def audit_host(state: HostState) -> list[str]:
    """Return one line for each wrong total of a host and of its lower tiers that no engine uses."""
    return wrong(totals(state) + ([] if state.jobs.pending else totals_at_rest(state)))


def audit(core: OffloadCore) -> list[str]:
    """Return one line for each broken invariant, without changing the core. Large pools make this slow."""
    state, stores = core.state, core.stores
    problems = [*core.audit(), *_without_pool(state, stores), *_slots(state), *pool_problems(state.pool)]
    if Tier.DISK in state.by_name:
        disk = disk_of(state)
        has = {slot for slot, has_block in enumerate(disk.has_block) if has_block}
        found = set(disk.pool.index.values())
        if has != found:
            problems.append(f"{len(has)} slots of the disk have checksums, {len(found)} can be found")
    for tier in state.tiers:
        if tier.is_open:
            problems += pool_problems(tier.pool)
        if not all(key in tier.pool.index for key in tier.unconfirmed):
            problems.append(f"blocks that the {tier.tier.value} tier does not have wait to be confirmed")
    return problems


def audit_side(side: SchedulerSide) -> list[str]:
    """Return one line for each broken invariant of the core and of the rest of the scheduler's side."""
    return [*side.audit(), *audit(side.core), *_copies(side)]


def _copies(side: SchedulerSide) -> Iterator[str]:
    """Yield the differences between the runtime's table of open copies and the core's records."""
    copies = side.copies
    running = Counter((copy.job.direction, copy.is_overdue) for copy in copies.by_job.values())
    for direction, is_overdue in product(Direction, (False, True)):
        counted, found = copies.count(direction, is_overdue=is_overdue), running[direction, is_overdue]
        if counted != found:
            yield f"open {direction.value}s, overdue {is_overdue}: {counted} counted, {found} found"
    for job, copy in copies.by_job.items():
        if not copy.running:
            yield f"no rank copies job {job}"
    if not (side.core.state.requests.live or side.core.state.jobs.pending) and side.degraded is None:
        if copies.awaited:
            yield f"loads of {[*copies.awaited]} are left"
        if (since := side.observation.pins.oldest) is not None:
            yield f"something is pinned since {since}"


def _without_pool(state: CoreState, stores: Stores) -> Iterator[str]:
    for what, counted, found in _counts(state, stores):
        if counted != found:
            yield f"{what}: {counted} counted, {found} found"
    for what, kept, derived in _indexes(state, stores):
        yield from _differences(what, kept, derived)
    if stores.leased_blocks > state.shape.lease_limit:
        yield f"stores lease {stores.leased_blocks} blocks, {state.shape.lease_limit} are allowed"
    yield from _waiting_for_room(stores)
    yield from _tables(state)
    for job in state.jobs.open.values():
        yield from _job(job)
    for record in _records(state):
        yield from _request(record)


def _differences(what: str, kept: Mapping[Any, Any], derived: Mapping[Any, Any]) -> Iterator[str]:
    for key in kept.keys() | derived.keys():
        if kept.get(key) != derived.get(key):
            yield f"{what}, {key}: {kept.get(key)!s:.40} kept, {derived.get(key)!s:.40} found"


def _records(state: CoreState) -> Iterable[RequestRecord]:
    return (*state.requests.live.values(), *state.requests.finishing)


def _counts(state: CoreState, stores: Stores) -> Iterator[tuple[str, int, int]]:
    """Yield each count's description, its value, and the value recomputed from the records."""
    pool, jobs, opened = state.pool, state.jobs, state.jobs.open.values()
    writing = [job for job in opened if isinstance(job, Store | Fetch) and not job.settled]
    filled = [slot for job in writing for slot in job.slots]
    filling = {slot for slot in filled if pool.state(slot) is SlotState.FILLING}
    yield "filling slots", pool.count(SlotState.FILLING), len(filling)
    yield "filling slots of open jobs", len(filled), len(filling)
    by_state = Counter((job.tier, job.direction, job.state) for job in opened)
    for tier, direction, job_state in product((Tier.HOST, Tier.DISK, Tier.REMOTE), Direction, _OPEN):
        what = f"{tier.value} {direction.value} jobs that are {job_state.name}"
        yield what, jobs.count(direction, job_state, tier), by_state[tier, direction, job_state]
    late = [job for job in opened if job.state is JobState.ABANDONED]
    yield "pending jobs", jobs.pending, len(opened) - len(late)
    below = [job for job in opened if job.tier is not Tier.HOST]
    yield "open jobs of lower tiers", jobs.open_on_tiers, len(below)
    reserved = sum([record.reserved for record in state.requests.live.values()])
    yield "device blocks reserved for requests with loads", state.requests.reserved, reserved
    under_late = sum([len(job.targets) for job in late if isinstance(job, DeviceJob)])
    yield "device blocks under copies that timed out", state.stall.blocks, under_late
    open_stores = [job for job in opened if isinstance(job, Store)]
    yield "blocks that stores lease", stores.leased_blocks, sum([len(job.targets) for job in open_stores])
    copying = sum([len(job.keys) for job in open_stores if not job.settled])
    yield "offers without an outcome", state.tally.open_offers, _waiting(state, stores) + copying
    of_request = Counter(record for job in opened if isinstance(job, DeviceJob) for record in job.concerns)
    for record in _records(state):
        yield f"jobs of request {record.request}", record.jobs, of_request[record]
    for lower in state.tiers:
        name = lower.tier.value
        spills = [job for job in opened if isinstance(job, Spill) and job.tier is lower.tier]
        written = sum([len(job.tier_slots) for job in spills if not job.settled])
        yield f"filling slots of the {name}", lower.pool.count(SlotState.FILLING), written
        fetches = [job for job in opened if isinstance(job, Fetch) and job.tier is lower.tier]
        read = sum([len(job.keys) for job in fetches if not job.settled])
        yield f"blocks being read from the {name}", lower.fetching, read


def _indexes(state: CoreState, stores: Stores) -> Iterator[tuple[str, Mapping[Any, Any], Mapping[Any, Any]]]:
    """Yield each index's description, the index, and the index recomputed from the records."""
    live, opened, in_flight = state.requests.live.values(), state.jobs.open.values(), stores.in_flight
    pins: Counter[SlotId] = Counter()
    for record in live:
        pins.update(record.hit.slots if record.hit is not None else ())
    for job in opened:
        # Ranks may still read a spill's slots after the spill's outcome is known.
        if isinstance(job, Spill) or (isinstance(job, Load) and not job.settled):
            pins.update(job.slots)
    yield "pins of slots", state.pool.pins, pins
    held = Counter(slot for each in _records(state) for slot in each.held)
    yield "holds of slots", state.pool.holds, held
    leased = Counter(block for job in opened if isinstance(job, DeviceJob) for block in job.targets)
    yield "leases of blocks", state.leases.counts, leased
    planned = [job for job in opened if job.state is JobState.PLANNED]
    yield "jobs of the next plan", dict(enumerate(state.jobs.planned)), dict(enumerate(planned))
    stores_open = [job for job in opened if isinstance(job, Store) and not job.settled]
    keys = {key: job for job in stores_open for key in job.keys}
    yield "keys in flight", in_flight.keys, keys | _keys(opened, Fetch)
    duplicates = dict.fromkeys(in_flight.duplicates, True)
    yield "keys that offers wait for", duplicates, {key: key in in_flight.keys for key in duplicates}
    owners = {
        (slot, record): True for slot, records in by_key(state.requests.loading).items() for record in records
    }
    loading = {(slot, record): True for record in live for slot in record.loading}
    yield "slots that others wait for", owners, loading
    kept = by_key(stores.evictions.watches).items()
    watches = {(key, record): True for key, each in kept for watch in each for record in watch.offers}
    watched = {
        (key, record): True
        for record in live
        for watch in record.watched
        for key in watch.keys
        if key not in record.stored_again
    }
    yield "keys watched for eviction", watches, watched
    for tier in state.tiers:
        name, jobs = tier.tier.value, [job for job in opened if job.tier is tier.tier]
        yield f"keys being written to the {name}", tier.in_flight.keys, _keys(jobs, Spill)
        fetches = [job for job in jobs if isinstance(job, Fetch) and not job.settled]
        read = Counter(slot for job in fetches for slot in job.tier_slots)
        yield f"pins of the {name}", tier.pool.pins, read


def by_key(claims: Claims[Key, Claimant]) -> dict[Key, list[Claimant]]:
    """Return who claims each key, after checking that each of them is listed once."""
    found = {key: [first, *claims.others.get(key, ())] for key, first in claims.first.items()}
    assert all(claims.others.values()), claims.others
    assert claims.others.keys() <= found.keys(), claims.others
    assert all(len(set(each)) == len(each) for each in found.values()), found
    return found


def _keys(jobs: Iterable[Job], kind: type[Fetch | Spill]) -> dict[Any, Job]:
    return {key: job for job in jobs if isinstance(job, kind) and not job.settled for key in job.keys}


def _job(job: Job) -> Iterator[str]:
    if job.state not in _OPEN or not job.waiting:
        yield f"job {job.id} is {job.state.name} and open, {len(job.waiting)} ranks copy"


def _request(record: RequestRecord) -> Iterator[str]:
    """Check that a request without a block table is not loading and has no data about a table (R14)."""
    where, has_table = f"request {record.request} is {record.state.name}", record.state in _HAS_TABLE
    if (record.table is not None) != has_table:
        yield f"{where} and has {'no' if record.table is None else 'a'} table"
    if record.waiting and record.state is not RequestState.RUNNING:
        yield f"{where} with offers waiting"
    if record.watched and not has_table:
        yield f"{where} and watches for evictions"
    if record.loading and not has_table:
        yield f"{where} and loads for others"
    if record.reserved and not has_table:
        yield f"{where} and reserves device blocks"
    if record.state is RequestState.LOADING and not record.reserved:
        yield f"{where} and reserves no device blocks"
    if record.hit is not None and record.state is not RequestState.SEEN:
        yield f"{where} with a pending hit"


def _waiting(state: CoreState, stores: Stores) -> int:
    """Return the number of offers that have no outcome yet and belong to no job."""
    waiting = sum(len(record.waiting) for record in state.requests.live.values())
    return waiting + sum(map(len, stores.in_flight.duplicates.values())) + len(stores.again)


def _waiting_for_room(stores: Stores) -> Iterator[str]:
    for record, positions in (*stores.for_room.items(), *stores.states_for_room.items()):
        for position in positions:
            if position not in record.waiting:
                yield f"{record.request} waits for room at {position} but has its outcome"


def _tables(state: CoreState) -> Iterator[str]:
    tables = state.tables
    expected = {
        (block, id(row), position): (record, group)
        for record in state.requests.live.values()
        if record.table is not None
        for group, row in enumerate(record.table)
        if state.shape.groups[group].recycles_blocks
        for position, block in enumerate(row)
        if block != NULL_BLOCK
    }
    named = [(block, entry) for block, entries in tables.shared.items() for entry in entries]
    found = {(block, id(row), position) for block, (row, position) in (*named, *tables.entries.items())}
    for block, row, position in expected.keys() ^ found:
        where = expected.get((block, row, position), "a table that no request has")
        yield f"block {block} at position {position} of {where}: index and table disagree"


def pool_problems(pool: SlotPool) -> Iterator[str]:
    """Yield the differences between the slots' records and the pool's counts, eviction order or free slots."""
    states = bytes(pool.state(SlotId(slot)) for slot in range(pool.capacity))
    ready = {slot for slot, state in enumerate(states) if state == SlotState.READY}
    empty = [slot for slot, state in enumerate(states) if state == SlotState.EMPTY]
    for state in SlotState:
        if states.count(state) != pool.count(state):
            yield f"{states.count(state)} slots are {state.name}, {pool.count(state)} are counted"
    order = pool.order
    if ready - pool.holds.keys() != set(order) or order.count != len(set(order)):
        yield "the eviction order is not the ready slots without a hold"
    if sorted([*pool._freed, *range(pool._fresh, pool.capacity)]) != empty:
        yield "the free slots are not the empty ones"


def _slots(state: CoreState) -> Iterator[str]:
    """Yield each slot that can hit but is missing from the index, and each slot that has a key but no bytes."""
    pool, parts = state.pool, state.pool.index.parts
    for slot in map(SlotId, range(pool.capacity)):
        key, slot_state = pool.key(slot), pool.state(slot)
        if (key is None) != (slot_state in _WITHOUT_KEY):
            yield f"slot {slot} is {slot_state.name} and has {'no' if key is None else 'a'} key"
        elif key is not None and slot_state in _CAN_HIT and parts[key[0]].get(key) != slot:
            yield f"slot {slot} is {slot_state.name} but not indexed"
