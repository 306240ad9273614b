"""The invariants. Counts and indexes that the core keeps are derived again from its records, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from kvoffload.core.jobs import DeviceJob, Fetch, Job, Load, Spill, Store
from kvoffload.core.machine import JobState, RequestState, SlotState
from kvoffload.core.request import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.model.ids import SlotId
from kvoffload.model.wire import Direction, Tier

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_WITHOUT_KEY = (SlotState.EMPTY, SlotState.QUARANTINED)
_OPEN = (JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED)
_HAS_TABLE = (RequestState.LOADING, RequestState.RUNNING)


def audit(state: CoreState, stores: Stores) -> list[str]:
    """Return every broken invariant as one line of text. Reads only; costs time in the size of the pool."""
    slots = map(SlotId, range(state.pool.capacity))
    problems = [*_without_pool(state, stores), *_slots(state, slots), *state.pool.problems()]
    if state.disk is not None:
        has = {slot for slot, has_block in enumerate(state.disk.has_block) if has_block}
        if has != set(state.disk.pool.index.values()):
            problems.append(
                f"{len(has)} slots of the disk have checksums, {len(state.disk.pool.index)} can be found"
            )
    for tier in state.tiers:
        if tier.is_open:
            problems += tier.pool.problems()
    return problems


def audit_at_rest(state: CoreState, stores: Stores, slots: Iterable[SlotId]) -> list[str]:
    """Return the invariants that are broken with no request and no copy under way, as far as that shows at once.

    Reads only; costs time in `slots`, which are looked at one by one, and not in the size of the pool: what requests
    and jobs leave behind shows in totals, which must be back where nothing holds anything.
    """
    problems = [*_without_pool(state, stores), *_slots(state, slots)]
    pool = state.pool
    evictable = pool.room - pool.count(SlotState.EMPTY)
    if not state.requests.finishing and evictable != pool.count(SlotState.READY):
        problems.append(f"{evictable} slots can be evicted, {pool.count(SlotState.READY)} are READY")
    return problems


def _without_pool(state: CoreState, stores: Stores) -> Iterator[str]:
    """What shows without a look at each slot."""
    for what, counted, found in _counts(state, stores):
        if counted != found:
            yield f"{what}: {counted} counted, {found} found"
    for what, kept, derived in _indexes(state, stores):
        yield from _differences(what, kept, derived)
    if stores.leased_blocks > state.shape.lease_limit:
        yield f"stores lease {stores.leased_blocks} blocks, {state.shape.lease_limit} are allowed"
    yield from stores.problems()
    yield from state.tables.problems(state.requests.live.values())
    for job in state.jobs.open.values():
        yield from _job(job)
    for record in _records(state):
        yield from _request(record)
    yield from _drained(state)


def _differences(what: str, kept: Mapping[Any, Any], derived: Mapping[Any, Any]) -> Iterator[str]:
    for key in kept.keys() | derived.keys():
        if kept.get(key) != derived.get(key):
            yield f"{what}, {key}: {kept.get(key)!s:.40} kept, {derived.get(key)!s:.40} found"


def _records(state: CoreState) -> Iterable[RequestRecord]:
    return (*state.requests.live.values(), *state.requests.finishing)


def _counts(state: CoreState, stores: Stores) -> Iterator[tuple[str, int, int]]:
    """Yield what is counted, the count, and the number that the records give."""
    pool, jobs, opened = state.pool, state.jobs, state.jobs.open.values()
    yield "slots in all states", sum(map(pool.count, SlotState)), pool.capacity
    yield "keys of slots that can hit", len(pool.index), sum(map(pool.count, _CAN_HIT))
    filled = [
        slot for job in opened if isinstance(job, Store | Fetch) and not job.settled for slot in job.slots
    ]
    filling = {slot for slot in filled if pool.state(slot) is SlotState.FILLING}
    yield "filling slots", pool.count(SlotState.FILLING), len(filling)
    yield "filling slots of open jobs", len(filled), len(filling)
    by_state = Counter((job.tier, job.direction, job.state) for job in opened)
    for tier, direction, job_state in product((Tier.HOST, Tier.DISK, Tier.REMOTE), Direction, _OPEN):
        what = f"{tier.value} {direction.value} jobs that are {job_state.name}"
        yield what, jobs.count(direction, job_state, tier), by_state[tier, direction, job_state]
    late = [job for job in opened if job.state is JobState.ABANDONED]
    yield "pending jobs", jobs.pending, len(opened) - len(late)
    under_late = sum([len(job.targets) for job in late if isinstance(job, DeviceJob)])
    yield "device blocks under copies that timed out", state.stall.blocks, under_late
    open_stores = [job for job in opened if isinstance(job, Store)]
    yield "blocks that stores lease", stores.leased_blocks, sum([len(job.targets) for job in open_stores])
    copying = sum([len(job.offers) for job in open_stores if not job.settled])
    yield "offers without an outcome", state.tally.open_offers, stores.waiting() + copying
    of_request = Counter(record for job in opened if isinstance(job, DeviceJob) for record in job.concerns)
    for record in _records(state):
        yield f"jobs of request {record.request}", record.jobs, of_request[record]
    for lower in state.tiers:
        name = lower.tier.value
        yield f"{name} jobs that timed out", lower.timed_out, sum([job.tier is lower.tier for job in late])
        spills = [job for job in opened if isinstance(job, Spill) and job.tier is lower.tier]
        written = sum([len(job.tier_slots) for job in spills if not job.settled])
        yield f"filling slots of the {name}", lower.pool.count(SlotState.FILLING), written
        fetches = [job for job in opened if isinstance(job, Fetch) and job.tier is lower.tier]
        read = sum([len(job.keys) for job in fetches if not job.settled])
        yield f"blocks being read from the {name}", lower.fetching, read


def _indexes(state: CoreState, stores: Stores) -> Iterator[tuple[str, Mapping[Any, Any], Mapping[Any, Any]]]:
    """Yield what is indexed, the index, and the index that the records give."""
    live, opened, in_flight = state.requests.live.values(), state.jobs.open.values(), stores.in_flight
    pins: Counter[SlotId] = Counter()
    for record in live:
        pins.update(record.hit.slots if record.hit is not None else ())
    for job in opened:
        # Some rank may read for a spill after its outcome is known.
        if isinstance(job, Spill) or (isinstance(job, Load) and not job.settled):
            pins.update(job.slots)
    yield "pins of slots", state.pool.pins, pins
    yield (
        "holds of slots",
        state.pool.holds,
        Counter(slot for each in _records(state) for slot in each.held),
    )
    leased = Counter(block for job in opened if isinstance(job, DeviceJob) for block in job.targets)
    yield "leases of blocks", state.leases.counts, leased
    planned = [job for job in opened if job.state is JobState.PLANNED]
    yield "jobs of the next plan", dict(enumerate(state.jobs.planned)), dict(enumerate(planned))
    keys = {
        offer.key: job for job in opened if isinstance(job, Store) and not job.settled for offer in job.offers
    }
    yield "keys in flight", in_flight.keys, keys | _keys(opened, Fetch)
    duplicates = dict.fromkeys(in_flight.duplicates, True)
    yield "keys that offers wait for", duplicates, {key: key in in_flight.keys for key in duplicates}
    owners = {(slot, record): True for slot, records in state.shared.owners.items() for record in records}
    loading = {(slot, record): True for record in live for slot in record.loading}
    yield "slots that others wait for", owners, loading
    watches = {(key, record): True for key, offers in stores.evictions.offers.items() for record in offers}
    watched = {(key, record): True for record in live for key in record.watched}
    yield "keys watched for eviction", watches, watched
    for tier in state.tiers:
        name, jobs = tier.tier.value, [job for job in opened if job.tier is tier.tier]
        spilling = dict.fromkeys(tier.spilling, True)
        yield f"keys being written to the {name}", spilling, dict.fromkeys(_keys(jobs, Spill), True)
        fetches = [job for job in jobs if isinstance(job, Fetch) and not job.settled]
        yield (
            f"pins of the {name}",
            tier.pool.pins,
            Counter(slot for job in fetches for slot in job.tier_slots),
        )


def _keys(jobs: Iterable[Job], kind: type[Fetch | Spill]) -> dict[Any, Job]:
    """Return the keys of the jobs of a kind that have no outcome."""
    return {key: job for job in jobs if isinstance(job, kind) and not job.settled for key in job.keys}


def _job(job: Job) -> Iterator[str]:
    if job.state not in _OPEN or not job.waiting:
        yield f"job {job.id} is {job.state.name} and open, {len(job.waiting)} ranks copy"


def _request(record: RequestRecord) -> Iterator[str]:
    """Only a request with a block table has what is tied to one. Only such a one loads for others (R14)."""
    where, has_table = f"request {record.request} is {record.state.name}", record.state in _HAS_TABLE
    if (record.table is not None) != has_table:
        yield f"{where} and has {'no' if record.table is None else 'a'} table"
    if record.waiting and record.state is not RequestState.RUNNING:
        yield f"{where} with offers waiting"
    if record.watched and not has_table:
        yield f"{where} and watches for evictions"
    if record.loading and not has_table:
        yield f"{where} and loads for others"
    if record.hit is not None and record.state is not RequestState.SEEN:
        yield f"{where} with a pending hit"


def _drained(state: CoreState) -> Iterator[str]:
    """With no request and no open job, every slot is EMPTY, READY or QUARANTINED (R11)."""
    if state.requests.live or state.jobs.open:
        return
    for slot_state in (SlotState.FILLING, SlotState.PINNED, SlotState.DRAINING):
        if state.pool.count(slot_state):
            yield f"{state.pool.count(slot_state)} slots are {slot_state.name} after all has drained"
    if state.leases.counts or state.requests.finishing:
        yield f"{len(state.leases.counts)} leases and {len(state.requests.finishing)} records after all has drained"


def _slots(state: CoreState, slots: Iterable[SlotId]) -> Iterator[str]:
    """A slot that can hit is in the index under its key; one without bytes has no key."""
    pool, parts = state.pool, state.pool.index.parts
    for slot in slots:
        key, slot_state = pool.key(slot), pool.state(slot)
        if (key is None) != (slot_state in _WITHOUT_KEY):
            yield f"slot {slot} is {slot_state.name} and has {'no' if key is None else 'a'} key"
        elif key is not None and slot_state in _CAN_HIT and parts[key[0]].get(key) != slot:
            yield f"slot {slot} is {slot_state.name} but not indexed"
