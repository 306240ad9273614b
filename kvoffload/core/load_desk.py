"""The load desk: loads that allocations make binding, and how they end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from kvoffload.core.jobs import Job
from kvoffload.core.lookup_desk import LookupDesk
from kvoffload.core.pending_hits import PendingHit
from kvoffload.core.pins import Pins
from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.states import JobEvent, JobState, RequestEvent, RequestState, SlotState
from kvoffload.model.causes import (
    CopyOutcome,
    EvictionCause,
    LoadOutcome,
    MissCause,
    PinDropCause,
    SurpriseCause,
)
from kvoffload.model.events import (
    EngineSurprised,
    HitDropped,
    LoadEnded,
    LoadScheduled,
)
from kvoffload.model.facts import BlocksAllocated
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId, RequestId, SlotId
from kvoffload.model.transfer import Direction, JobReport


class _Copies(NamedTuple):
    slots: list[SlotId]
    blocks: list[DeviceBlockId]


class LoadDesk:
    """Plans loads and ends them."""

    def __init__(self, state: CoreState, lookups: LookupDesk) -> None:
        self._state = state
        self._lookups = lookups
        self._planned: list[Job] = []

    # -- allocations --------------------------------------------------------------------------------------------

    def on_allocated(self, fact: BlocksAllocated) -> None:
        """A request got a block table: its hit becomes a load, or is let go (R2)."""
        state = self._state
        record = state.requests.live(fact.request)
        if record is None or record.state is not RequestState.SEEN:
            self._refuse(record, fact)
            return
        hit = state.hits.take(fact.request)
        if hit is not None:
            self._lookups.settle(record, hit)
        record.found_tokens = record.loaded_tokens = record.confirmed_tokens = fact.device_tokens
        if fact.external_tokens == 0:
            self._decline(record, hit)
            state.requests.move(record, RequestEvent.ALLOCATE)
            return
        state.requests.move(record, RequestEvent.ALLOCATE_AND_LOAD)
        self._load(record, fact, hit)

    def _refuse(self, record: RequestRecord | None, fact: BlocksAllocated) -> None:
        """Nobody answered a lookup with these tokens, but the engine waits for them: say that they do not come."""
        if fact.external_tokens == 0 or (record is not None and record.state is RequestState.LOADING):
            return
        self._state.outbox.put(EngineSurprised(SurpriseCause.TOKENS_WITHOUT_PIN, fact.request))
        self._state.results.failed.append(fact.request)

    def _decline(self, record: RequestRecord, hit: PendingHit | None) -> None:
        """The engine takes nothing from the host."""
        if hit is None or hit.pins is None:
            return
        hit.pins.close()
        self._state.holds.head_was_used(record, hit.device_tokens)
        self._state.outbox.put(HitDropped(record.request, hit.blocks, PinDropCause.NOT_ACCEPTED))
        self._state.outbox.put(EngineSurprised(SurpriseCause.PIN_WITHOUT_TOKENS, record.request))

    def _load(self, record: RequestRecord, fact: BlocksAllocated, hit: PendingHit | None) -> None:
        """Plan the load of what the engine accepted. Tokens that nothing on the host covers fail at once."""
        state = self._state
        length = fact.device_tokens + fact.external_tokens
        if hit is None or length > hit.tokens:
            state.outbox.put(EngineSurprised(SurpriseCause.TOKENS_WITHOUT_PIN, record.request))
        may_load = not (state.degraded or state.stall.is_on)
        copies = self._copies(record, fact, length) if may_load else None
        pins = state.pool.pin(tuple(copies.slots)) if copies is not None else None
        if hit is not None and hit.pins is not None:
            hit.pins.close()
            if rest := len(set(hit.pins.slots).difference(copies.slots if copies is not None else ())):
                state.holds.head_was_used(record, fact.device_tokens)
                state.outbox.put(HitDropped(record.request, rest, PinDropCause.NOT_ACCEPTED))
        if copies is None or pins is None:
            self._finish(record.request, record.incarnation, loaded=False)
            return
        record.loaded_tokens = record.confirmed_tokens = length
        if copies.slots:
            self._plan(record, copies, pins, fact.external_tokens)
        else:
            pins.close()
            self._finish(record.request, record.incarnation, loaded=True)

    def _plan(self, record: RequestRecord, copies: _Copies, pins: Pins, tokens: int) -> None:
        state = self._state
        lease = state.leases.open()
        lease.add(copies.blocks)
        job = state.jobs.plan(Direction.LOAD, lease)
        job.slots, job.blocks = copies.slots, copies.blocks
        job.request = (record.request, record.incarnation)
        job.pins = pins
        job.concerns.append(record)
        state.requests.job_opened(record)
        state.shared.started(record.request, copies.slots)
        self._planned.append(job)
        slots = tuple(copies.slots)
        state.outbox.put(LoadScheduled(job.job, record.request, len(slots), tokens, slots))

    def _copies(self, record: RequestRecord, fact: BlocksAllocated, length: int) -> _Copies | None:
        """Return what must be copied to go on at `length`, heads first; None where the host lacks some of it.

        By key and not by what was pinned: a pinned block may have turned out worthless since, and fewer tokens than
        were found can need other blocks.
        """
        parts = self._state.pool.index.parts
        places: list[tuple[int, SlotId, DeviceBlockId]] = []
        for group, table in zip(self._state.shape.groups, fact.tables, strict=True):
            keys = record.keys[group.group]
            first = max(group.first_needed_token(length), fact.device_tokens) // group.block_tokens
            for position in range(first, min(-(-length // group.block_tokens), len(table))):
                block = table[position]
                if block == NULL_BLOCK:
                    continue  # the engine does not read it
                key = keys[position] if position < len(keys) else None
                slot = None if key is None else parts[key[0]].get(key)
                if slot is None:
                    return None
                places.append((position * group.block_tokens, slot, block))
        if len(self._state.shape.groups) > 1:
            places.sort(key=itemgetter(0))
        return _Copies([slot for _, slot, _ in places], [block for _, _, block in places])

    # -- endings ------------------------------------------------------------------------------------------------

    @property
    def planned(self) -> Sequence[Job]:
        """The step's loads. Reads only."""
        return self._planned

    def submit(self) -> None:
        """Hand the step's loads over."""
        planned, self._planned = self._planned, []
        self._state.jobs.submit(planned)

    def loaded(self, job: Job) -> None:
        """Every rank has copied: the request can run."""
        assert job.request is not None, job
        assert job.pins is not None, job
        record = self._state.requests.incarnation(*job.request)
        if record is not None:
            pool = self._state.pool
            whole = [slot for slot in job.slots if pool.state(slot) == SlotState.PINNED]
            self._state.holds.add(record, whole)
        job.pins.close()
        self._ended(job, LoadOutcome.LOADED)
        self._finish(*job.request, loaded=True)

    def doubted(self, job: Job, part: JobReport) -> None:
        """A rank's copy failed: the slots are worthless at once, though other ranks may still read them (R4).

        Where a checksum told which blocks are corrupt, only those are lost, and their memory with them.
        """
        pool = self._state.pool
        if part.outcome is CopyOutcome.CORRUPT:
            lost = [job.slots[position] for position in part.corrupt] or job.slots
            self._note(lost, MissCause.CORRUPT)
            self._state.outbox.evicted(EvictionCause.CORRUPT, sum(map(pool.quarantine, lost)))
        else:
            self._note(job.slots, MissCause.LOAD_FAILED)
            self._state.outbox.evicted(EvictionCause.LOAD_FAILED, sum(map(pool.doom, job.slots)))

    def failed(self, job: Job, outcome: LoadOutcome) -> None:
        """The load's outcome is known and bad: the engine recomputes (R9)."""
        assert job.request is not None, job
        assert job.pins is not None, job
        job.pins.close()
        self._ended(job, outcome)
        self._finish(*job.request, loaded=False)

    def fail_open(self) -> None:
        """Nobody will tell how these end: the engine recomputes, and the copies end on leased blocks."""
        for job in self._state.jobs.all():
            if job.direction is Direction.LOAD and not job.settled:
                self.failed(job, LoadOutcome.FAILED)

    def written_off(self, job: Job) -> None:
        """A load that did not end in time: its slots are never handed out again (R16)."""
        self._note(job.slots, MissCause.LOAD_FAILED)
        lost = sum(map(self._state.pool.quarantine, job.slots))
        self._state.outbox.evicted(EvictionCause.ABANDONED, lost)

    def copies_ended(self, job: Job) -> None:
        """No rank touches the job's memory any more: give it back."""
        job.lease.close()
        for record in job.concerns:
            self._state.requests.job_ended(record)
            self._state.holds.let_go_if_over(record)

    def on_request_ended(self, record: RequestRecord) -> None:
        """A request is ending: drop its pins, and take back a load that no worker knows of yet."""
        self._lookups.drop(record.request, PinDropCause.REQUEST_ENDED)
        self.cancel_planned(record)

    def cancel_planned(self, record: RequestRecord | None = None) -> None:
        """Take back the loads that no worker knows of yet, of one request or all."""
        if not self._planned:
            return
        for job in self._planned:
            if record is None or job.request == (record.request, record.incarnation):
                self._state.jobs.move(job, JobEvent.CANCEL)
                self.failed(job, LoadOutcome.CANCELLED)
                self.copies_ended(job)
        self._planned = [job for job in self._planned if job.state is JobState.PLANNED]

    def _note(self, slots: list[SlotId], cause: MissCause) -> None:
        """Keys that are about to leave the index miss for this cause from now on."""
        pool = self._state.pool
        self._state.misses.note([key for slot in slots if (key := pool.indexed_key(slot)) is not None], cause)

    def _ended(self, job: Job, outcome: LoadOutcome) -> None:
        assert job.request is not None, job
        job.settled = True
        corrupt = len(job.corrupt) if outcome is LoadOutcome.CORRUPT else 0
        if corrupt:
            self._state.outbox.put(LoadEnded(job.job, job.request[0], corrupt, LoadOutcome.CORRUPT))
            outcome = LoadOutcome.FAILED
        if len(job.slots) > corrupt:
            self._state.outbox.put(LoadEnded(job.job, job.request[0], len(job.slots) - corrupt, outcome))

    def _finish(self, request: RequestId, incarnation: int, *, loaded: bool) -> None:
        """Tell the engine, exactly once a load, and move the request on if it is still waiting for it."""
        state = self._state
        (state.results.loaded if loaded else state.results.failed).append(request)
        record = state.requests.incarnation(request, incarnation)
        if record is None or record.state is not RequestState.LOADING:
            return
        if loaded:
            state.requests.move(record, RequestEvent.LOADED)
            return
        record.load_failed = True
        state.requests.move(record, RequestEvent.LOAD_FAILED)
        state.tables.forget(request)
        state.shared.ended(request)
