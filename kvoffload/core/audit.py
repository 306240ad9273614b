"""The conservation laws. Each is a function that yields how it is broken; the audit returns all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from kvoffload.core.jobs import DeviceJob, Fetch, Job, Load, Spill, Store
from kvoffload.core.machine import JobState, RequestState, SlotState
from kvoffload.core.request import has_table
from kvoffload.core.state import CoreState
from kvoffload.core.stores import EvictionWatch, InFlight, Stores
from kvoffload.core.tiers import LowerTier
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.transfer import Direction, Tier

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_WITHOUT_KEY = (SlotState.EMPTY, SlotState.QUARANTINED)
_OPEN = (JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED)


def audit(state: CoreState, stores: Stores) -> list[str]:
    """Return every violated law as one line of text. Reads only; costs time in the size of the pool."""
    laws = (_totals, _slots, _records, _sums)
    problems = [problem for law in laws for problem in law(state)]
    problems += [problem for tier in state.tiers if tier.is_open for problem in tier.pool.problems()]
    return problems + list(_offers(state, stores)) + state.pool.problems()


def audit_at_rest(state: CoreState, stores: Stores, slots: Iterable[SlotId]) -> list[str]:
    """Return the laws that are violated with no request and no copy under way, as far as that shows at once.

    Reads only; costs time in `slots`, which are looked at one by one, and not in the size of the pool: what requests
    and jobs leave behind shows in totals, which must be back where nothing holds anything.
    """
    problems = [problem for law in (_totals, _records) for problem in law(state)]
    problems += _some_slots(state, slots)
    pool = state.pool
    evictable = pool.room - pool.count(SlotState.EMPTY)
    if not state.requests.finishing and evictable != pool.count(SlotState.READY):
        problems.append(f"{evictable} slots can be evicted, {pool.count(SlotState.READY)} are READY")
    return problems + list(_offers(state, stores))


def _records(state: CoreState) -> Iterator[str]:
    """What requests, jobs and hits hold."""
    for law in (
        _pins,
        _holds,
        _jobs,
        _filling,
        _stalled,
        _leases,
        _requests,
        _drained,
        _lower_tiers,
    ):
        yield from law(state)


def _offers(state: CoreState, stores: Stores) -> Iterator[str]:
    """Stores lease what is counted, and every offer is somewhere."""
    opened = state.jobs.open.values()
    leased = sum([len(job.targets) for job in opened if isinstance(job, Store)])
    if leased != stores.leased_blocks:
        yield f"stores lease {leased} blocks, {stores.leased_blocks} are counted"
    if stores.leased_blocks > state.shape.lease_limit:
        yield f"stores lease {stores.leased_blocks} blocks, {state.shape.lease_limit} are allowed"
    copying = sum([len(job.offers) for job in opened if isinstance(job, Store) and not job.settled])
    undecided = state.tally.open_offers
    if undecided != stores.waiting() + copying:
        yield f"{undecided} offers have no outcome; {stores.waiting()} wait and {copying} are being copied"
    yield from stores.problems()
    yield from _in_flight(state, stores.in_flight)
    yield from _indexes(state, stores.evictions)
    yield from state.tables.problems(state.requests.live.values())


def _totals(state: CoreState) -> Iterator[str]:
    """The states add up to the capacity, and the index has as many keys as slots can hit."""
    pool = state.pool
    total = sum([pool.count(slot_state) for slot_state in SlotState])
    if total != pool.capacity:
        yield f"slots by state sum to {total}, the capacity is {pool.capacity}"
    can_hit = pool.count(SlotState.READY) + pool.count(SlotState.PINNED)
    if can_hit != len(pool.index):
        yield f"{can_hit} slots can hit, {len(pool.index)} keys are indexed"


def _slots(state: CoreState) -> Iterator[str]:
    """Every slot's record agrees with the index, and the states are counted."""
    pool = state.pool
    counted = Counter(pool.state(SlotId(slot)) for slot in range(pool.capacity))
    for slot_state in SlotState:
        if counted[slot_state] != pool.count(slot_state):
            yield f"{counted[slot_state]} slots are {slot_state.name}, {pool.count(slot_state)} are counted"
    for key, slot in pool.index.items():
        if pool.key(slot) != key or pool.state(slot) not in (SlotState.READY, SlotState.PINNED):
            yield f"slot {slot} is indexed but {pool.state(slot).name}"


def _some_slots(state: CoreState, slots: Iterable[SlotId]) -> Iterator[str]:
    """A slot that can hit is in the index under its key; one without bytes has no key."""
    pool, parts = state.pool, state.pool.index.parts
    for slot in slots:
        key, slot_state = pool.key(slot), pool.state(slot)
        if (key is None) != (slot_state in _WITHOUT_KEY):
            yield f"slot {slot} is {slot_state.name} and has {'no' if key is None else 'a'} key"
        elif key is not None and slot_state in _CAN_HIT and parts[key[0]].get(key) != slot:
            yield f"slot {slot} is {slot_state.name} but not indexed"


def _pins(state: CoreState) -> Iterator[str]:
    """Every pin belongs to a pending hit, to a load without an outcome, or to a spill that some rank may still read for."""
    expected: Counter[SlotId] = Counter()
    for record in state.requests.live.values():
        expected.update(record.hit.slots if record.hit is not None else ())
    for job in state.jobs.open.values():
        if isinstance(job, Spill) or (isinstance(job, Load) and not job.settled):
            expected.update(job.slots)
    yield from _differences("pins", expected, state.pool.pins())


def _holds(state: CoreState) -> Iterator[str]:
    """Every hold belongs to a request that runs, or whose last copies run."""
    expected: Counter[SlotId] = Counter()
    for record in (*state.requests.live.values(), *state.requests.finishing):
        expected.update(record.held)
    yield from _differences("holds", expected, state.pool.holds())


def _differences(what: str, expected: Counter[SlotId], found: Mapping[SlotId, int]) -> Iterator[str]:
    for slot in expected.keys() | found.keys():
        if expected[slot] != found.get(slot, 0):
            yield f"slot {slot} has {found.get(slot, 0)} {what}, {expected[slot]} are owned"


def _jobs(state: CoreState) -> Iterator[str]:
    """Open jobs are open, and the counts are right."""
    jobs, opened = state.jobs, state.jobs.open.values()
    for job in opened:
        if job.state not in _OPEN:
            yield f"job {job.id} is {job.state.name} but in the table of open ones"
        if not job.waiting:
            yield f"job {job.id} is open although no rank copies"
    found = Counter((job.tier, job.direction, job.state) for job in opened)
    for tier, direction, job_state in product((Tier.HOST, Tier.DISK, Tier.REMOTE), Direction, _OPEN):
        number = found[tier, direction, job_state]
        if number != jobs.count(direction, job_state, tier):
            yield f"{number} {tier.value} {direction.value} jobs are {job_state.name}, another number is counted"
    if [job for job in opened if job.state is JobState.PLANNED] != jobs.planned:
        yield "the planned jobs are not those of the next plan"
    pending = sum([job.state is not JobState.ABANDONED for job in opened])
    if pending != jobs.pending:
        yield f"{pending} jobs are pending, {jobs.pending} are counted"


def _filling(state: CoreState) -> Iterator[str]:
    """Filling slots belong to exactly one open store or fetch each."""
    fills = [job for job in state.jobs.open.values() if isinstance(job, Store | Fetch) and not job.settled]
    filling = Counter(slot for job in fills for slot in job.slots)
    if sum(filling.values()) != state.pool.count(SlotState.FILLING) or any(
        count != 1 or state.pool.state(slot) != SlotState.FILLING for slot, count in filling.items()
    ):
        yield "filling slots and open stores disagree"


def _stalled(state: CoreState) -> Iterator[str]:
    """Device blocks under abandoned copies are counted, and no others."""
    jobs, late = state.jobs.open.values(), JobState.ABANDONED
    blocks = sum([len(job.targets) for job in jobs if isinstance(job, DeviceJob) and job.state is late])
    if blocks != state.stall.blocks:
        yield f"{blocks} blocks are under abandoned copies, {state.stall.blocks} are counted"


def _leases(state: CoreState) -> Iterator[str]:
    """Every lease belongs to an open job."""
    opened = state.jobs.open.values()
    expected = Counter(block for job in opened if isinstance(job, DeviceJob) for block in job.targets)
    if expected != Counter(state.leases.counts):
        yield f"leased blocks {dict(state.leases.counts)} differ from those of open jobs {dict(expected)}"


def _in_flight(state: CoreState, in_flight: InFlight) -> Iterator[str]:
    """Blocks in flight are those of open stores, keys those of stores and fetches without an outcome."""
    stores = [job for job in state.jobs.open.values() if isinstance(job, Store)]
    if {block: job for job in stores for block in job.targets} != in_flight.blocks:
        yield "blocks in flight and open stores disagree"
    keys: dict[BlockKey, Job] = {offer.key: job for job in stores if not job.settled for offer in job.offers}
    fetches = [job for job in state.jobs.open.values() if isinstance(job, Fetch)]
    keys |= {key: job for job in fetches if not job.settled for key in job.keys}
    if keys != in_flight.keys:
        yield "keys in flight and open stores disagree"
    for key in in_flight.duplicates:
        if key not in in_flight.keys:
            yield "an offer waits for a key that is not in flight"


def _requests(state: CoreState) -> Iterator[str]:
    """Requests count their jobs; only those with a block table have what is tied to one."""
    opened = state.jobs.open.values()
    jobs = Counter(record for job in opened if isinstance(job, DeviceJob) for record in job.concerns)
    for record in (*state.requests.live.values(), *state.requests.finishing):
        name, where = record.request, record.state.name
        if record.jobs != jobs[record]:
            yield f"request {name} counts {record.jobs} jobs, {jobs[record]} are open"
        if (record.table is not None) != has_table(record):
            yield f"request {name} is {where} and has {'no' if record.table is None else 'a'} table"
        if record.waiting and record.state is not RequestState.RUNNING:
            yield f"request {name} is {where} with offers waiting"
        if record.watched and not has_table(record):
            yield f"request {name} is {where} and watches for evictions"
        if record.hit is not None and record.state is not RequestState.SEEN:
            yield f"request {name} is {where} with a pending hit"


def _indexes(state: CoreState, evictions: EvictionWatch) -> Iterator[str]:
    """Indexes by slot and key name what records say. Only who has a block table loads for others (R14)."""
    live = state.requests.live.values()
    owners = {(slot, record) for slot, records in state.shared.owners.items() for record in records}
    if owners != {(slot, record) for record in live for slot in record.loading}:
        yield "the loads that others wait for and the requests that make them disagree"
    for record in {record for _, record in owners}:
        if not has_table(record):
            yield f"request {record.request} is {record.state.name} and loads for others"
    watched = {(key, record) for key, offers in evictions.offers.items() for record in offers}
    if watched != {(key, record) for record in live for key in record.watched}:
        yield "the keys watched for eviction and the requests that watch disagree"


def _lower_tiers(state: CoreState) -> Iterator[str]:
    """Each lower tier's slots and keys under way are those of open jobs."""
    for tier in state.tiers:
        yield from _lower_tier(state, tier)


def _sums(state: CoreState) -> Iterator[str]:
    """The disk's checksums are those of the blocks that can be found there."""
    if state.disk is not None:
        has = {slot for slot, has_block in enumerate(state.disk.has_block) if has_block}
        found = set(state.disk.pool.index.values())
        if has != found:
            yield f"{len(has)} slots of the disk have checksums, {len(found)} can be found"


def _lower_tier(state: CoreState, tier: LowerTier) -> Iterator[str]:
    name, jobs = tier.tier.value, [job for job in state.jobs.open.values() if job.tier is tier.tier]
    if sum(job.state is JobState.ABANDONED for job in jobs) != tier.timed_out:
        yield f"{tier.timed_out} jobs on tier {name} are counted as timed out, another number is open"
    spills = [job for job in jobs if isinstance(job, Spill) and not job.settled]
    fetches = [job for job in jobs if isinstance(job, Fetch) and not job.settled]
    if {key: job for job in spills for key in job.keys} != tier.spilling:
        yield f"keys that are being spilled and open jobs disagree on tier {name}"
    if {key: job for job in fetches for key in job.keys} != tier.fetching:
        yield f"keys that are being fetched and open jobs disagree on tier {name}"
    filling = [slot for job in spills for slot in job.tier_slots]
    if len(filling) != tier.pool.count(SlotState.FILLING):
        yield f"filling slots and open spills disagree on tier {name}"
    reading = Counter(slot for job in fetches for slot in job.tier_slots)
    yield from _differences(f"pins of tier {name}", reading, tier.pool.pins())


def _drained(state: CoreState) -> Iterator[str]:
    """With no request and no open job, every slot is EMPTY, READY or QUARANTINED (R11)."""
    if state.requests.live or state.jobs.open:
        return
    for slot_state in (SlotState.FILLING, SlotState.PINNED, SlotState.DRAINING):
        if state.pool.count(slot_state):
            yield f"{state.pool.count(slot_state)} slots are {slot_state.name} after all has drained"
    if state.leases.counts or state.requests.finishing:
        yield f"{len(state.leases.counts)} leases and {len(state.requests.finishing)} records after all has drained"
