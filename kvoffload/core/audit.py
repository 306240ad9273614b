"""The conservation laws. Each is a function that returns how it is broken; the audit returns all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

from kvoffload.core.offer_book import OfferBook
from kvoffload.core.state import CoreState
from kvoffload.core.states import JobState, RequestState, SlotState
from kvoffload.model.ids import SlotId
from kvoffload.model.transfer import Direction

_OPEN = (JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED)


def audit(state: CoreState, book: OfferBook, store_leases: int) -> list[str]:
    """Return every violated law as one line of text. Reads only; costs time in the size of the pool."""
    laws = (_totals, _slots, _records)
    problems = [problem for law in laws for problem in law(state)]
    return problems + _offers(state, book, store_leases) + state.pool.problems()


def audit_at_rest(state: CoreState, book: OfferBook, store_leases: int, slots: Iterable[SlotId]) -> list[str]:
    """Return the laws that are violated with no request and no copy under way, as far as that shows at once.

    Reads only; costs time in `slots`, which are looked at one by one, and not in the size of the pool: what requests
    and jobs leave behind shows in totals, which must be back where nothing holds anything.
    """
    problems = [problem for law in (_totals, _records) for problem in law(state)]
    problems += [problem for slot in slots for problem in _slot(state, slot)]
    pool = state.pool
    evictable = pool.room - pool.count(SlotState.EMPTY)
    if not state.requests.finishing() and evictable != pool.count(SlotState.READY):
        problems.append(f"{evictable} slots can be evicted, {pool.count(SlotState.READY)} are READY")
    return problems + _offers(state, book, store_leases)


def _records(state: CoreState) -> Iterator[str]:
    """What requests, jobs and hits hold."""
    for law in (
        _pins,
        _holds,
        _jobs,
        _filling,
        _checks,
        _given_up,
        _leases,
        _in_flight,
        _requests,
        _owners,
        _drained,
    ):
        yield from law(state)


def _offers(state: CoreState, book: OfferBook, store_leases: int) -> list[str]:
    """Stores lease what is counted, and every offer is somewhere."""
    problems = []
    leased = sum(len(job.blocks) for job in state.jobs.all() if job.direction is Direction.STORE)
    if leased != store_leases:
        problems.append(f"stores lease {leased} blocks, {store_leases} are counted")
    if store_leases > state.shape.lease_limit:
        problems.append(f"stores lease {store_leases} blocks, {state.shape.lease_limit} are allowed")
    copying = sum(len(job.offers) for job in state.jobs.all() if not job.settled)
    if state.outbox.open_offers != book.waiting() + copying:
        problems.append(
            f"{state.outbox.open_offers} offers have no outcome; {book.waiting()} wait and {copying} are being copied"
        )
    return problems + state.tables.problems() + book.problems()


def _totals(state: CoreState) -> Iterator[str]:
    """The states add up to the capacity, and the index has as many keys as slots can hit."""
    pool = state.pool
    total = sum(pool.count(slot_state) for slot_state in SlotState)
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


def _slot(state: CoreState, slot: SlotId) -> Iterator[str]:
    """A slot that can hit is in the index under its key; one without bytes has no key. Costs no pass over anything."""
    key, indexed = state.pool.key(slot), state.pool.indexed_key(slot)
    if indexed is not None and state.pool.index.get(indexed) != slot:
        yield f"slot {slot} is {state.pool.state(slot).name} but not indexed"
    if (key is None) != (state.pool.state(slot) in (SlotState.EMPTY, SlotState.QUARANTINED)):
        yield f"slot {slot} is {state.pool.state(slot).name} and has {'no' if key is None else 'a'} key"


def _pins(state: CoreState) -> Iterator[str]:
    """Every pin belongs to a pending hit or an open load."""
    expected: Counter[SlotId] = Counter()
    for hit in state.hits.all().values():
        expected.update(hit.pins.slots if hit.pins is not None else ())
    for job in state.jobs.all():
        if job.pins is not None and not job.pins.closed:
            expected.update(job.pins.slots)
    for slot in expected.keys() | state.pool.pins().keys():
        if expected[slot] != state.pool.pins().get(slot, 0):
            yield f"slot {slot} has {state.pool.pins().get(slot, 0)} pins, {expected[slot]} are owned"


def _holds(state: CoreState) -> Iterator[str]:
    """Every hold belongs to a request that runs, or whose last copies run."""
    expected: Counter[SlotId] = Counter()
    for record in (*state.requests.all_live(), *state.requests.finishing()):
        expected.update(record.held)
    for slot in expected.keys() | state.pool.holds().keys():
        if expected[slot] != state.pool.holds().get(slot, 0):
            yield f"slot {slot} has {state.pool.holds().get(slot, 0)} holds, {expected[slot]} are owned"


def _jobs(state: CoreState) -> Iterator[str]:
    """Open jobs are open, and the counts are right."""
    for job in state.jobs.all():
        if job.state not in _OPEN:
            yield f"job {job.job} is {job.state.name} but in the table of open ones"
        if job.copies_ended:
            yield f"job {job.job} is open although no rank copies"
    found = Counter((job.direction, job.state) for job in state.jobs.all())
    for direction, job_state in product(Direction, _OPEN):
        if found[direction, job_state] != state.jobs.count(direction, job_state):
            yield f"{found[direction, job_state]} {direction.value} jobs are {job_state.name}, another number is counted"
    planned = sum(job.state is JobState.PLANNED for job in state.jobs.all())
    if planned != state.jobs.planned:
        yield f"{planned} jobs are planned, {state.jobs.planned} are counted"
    pending = sum(job.state is not JobState.ABANDONED for job in state.jobs.all())
    if pending != state.jobs.pending:
        yield f"{pending} jobs are pending, {state.jobs.pending} are counted"


def _filling(state: CoreState) -> Iterator[str]:
    """Filling slots belong to exactly one open store each."""
    stores = [job for job in state.jobs.all() if job.direction is Direction.STORE and not job.settled]
    filling = Counter(slot for job in stores for slot in job.slots)
    if sum(filling.values()) != state.pool.count(SlotState.FILLING) or any(
        count != 1 or state.pool.state(slot) != SlotState.FILLING for slot, count in filling.items()
    ):
        yield "filling slots and open stores disagree"


def _checks(state: CoreState) -> Iterator[str]:
    """What is being read belongs to one open check, and only what a hit keeps counts as checked."""
    checks = [job for job in state.jobs.all() if job.direction is Direction.CHECK and not job.settled]
    if Counter(slot for job in checks for slot in job.slots) != Counter(state.checked.being_read()):
        yield "slots that are being read and open checks disagree"
    kept = {slot for hit in state.hits.all().values() if hit.pins is not None for slot in hit.pins.slots}
    if loose := state.checked.checked() - kept:
        yield f"slots {sorted(loose)} count as checked, and no hit keeps them"


def _given_up(state: CoreState) -> Iterator[str]:
    """Device blocks under copies that were given up are counted, and nothing else."""
    blocks = sum(len(job.blocks) for job in state.jobs.all() if job.state is JobState.ABANDONED)
    if blocks != state.stall.blocks:
        yield f"{blocks} blocks are under copies that were given up, {state.stall.blocks} are counted"


def _leases(state: CoreState) -> Iterator[str]:
    """Every lease belongs to an open job."""
    expected = Counter(block for job in state.jobs.all() for block in job.blocks)
    if expected != Counter(state.leases.counts()):
        yield f"leased blocks {state.leases.counts()} differ from those of open jobs {dict(expected)}"


def _in_flight(state: CoreState) -> Iterator[str]:
    """Blocks in flight are those of open stores, keys those of stores without an outcome."""
    stores = [job for job in state.jobs.all() if job.direction is Direction.STORE]
    if {block: job.job for job in stores for block in job.blocks} != dict(state.stores.blocks):
        yield "blocks in flight and open stores disagree"
    if {offer.key: job.job for job in stores if not job.settled for offer in job.offers} != dict(
        state.stores.keys
    ):
        yield "keys in flight and open stores disagree"
    for key in state.stores.waiting():
        if key not in state.stores.keys:
            yield "an offer waits for a key that is not in flight"


def _requests(state: CoreState) -> Iterator[str]:
    """Requests count their jobs; only those with a table have what is tied to one."""
    jobs = Counter(record for job in state.jobs.all() for record in job.concerns)
    for record in (*state.requests.all_live(), *state.requests.finishing()):
        if record.jobs != jobs[record]:
            yield f"request {record.request} counts {record.jobs} jobs, {jobs[record]} are open"
    for record in state.requests.all_live():
        has_table = state.tables.table(record.request) is not None
        if has_table != record.has_table:
            yield f"request {record.request} is {record.state.name} and has {'a' if has_table else 'no'} table"
        if record.unsettled and record.state is not RequestState.RUNNING:
            yield f"request {record.request} is {record.state.name} with offers waiting"
    for request in (*state.hits.all(), *state.shared.owners(), *state.restores.watched()):
        if state.requests.live(request) is None:
            yield f"request {request} is gone but something is kept for it"


def _owners(state: CoreState) -> Iterator[str]:
    """Only who has a block table loads for others: nobody who asks can be told to wait for itself (R14)."""
    owners = state.shared.owners()
    for record in state.requests.all_live() if owners else ():
        if not record.has_table and record.request in owners:
            yield f"request {record.request} is {record.state.name} and loads for others"


def _drained(state: CoreState) -> Iterator[str]:
    """With no request and no open job, every slot is EMPTY, READY or QUARANTINED (R11)."""
    if state.requests.all_live() or state.jobs.all():
        return
    for slot_state in (SlotState.FILLING, SlotState.PINNED, SlotState.DRAINING):
        if state.pool.count(slot_state):
            yield f"{state.pool.count(slot_state)} slots are {slot_state.name} after all has drained"
    if state.leases.total or state.requests.finishing():
        yield f"{state.leases.total} leases and {len(state.requests.finishing())} records after all has drained"
