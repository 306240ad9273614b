"""Loads: an allocation turns a pending hit into a load job, workers copy it, and its request runs or recomputes.

    allocated ─▶ _load ─▶ Jobs.submit ─▶ reported ─▶ _arrived │ _failed ─▶ _answer
                   │          overdue ─▶ abandoned ─────────────┘
                   └─ nothing to load, or not to be had ─▶ _answer

Every load that the engine waits for is answered exactly once (`_answer`). Memory is released later, when every rank has
ended its copy (`_copies_ended`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from kvoffload.core.job import Job
from kvoffload.core.machine import RequestEvent, RequestState
from kvoffload.core.pending_hits import PendingHits
from kvoffload.core.request import PendingHit, RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.model.causes import (
    CopyOutcome,
    EvictionCause,
    LoadOutcome,
    MissCause,
    PinDropCause,
    RejectionCause,
)
from kvoffload.model.events import FactRejected, HitDropped, LoadEnded, LoadScheduled, StatesCopied
from kvoffload.model.facts import BlocksAllocated
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId, RequestId, SlotId
from kvoffload.model.transfer import Direction, JobReport

_LOADING, _FINISHING = RequestState.LOADING, RequestState.FINISHING
_Copies = tuple[list[SlotId], list[DeviceBlockId]]


class Loads:
    """Plans loads and ends them."""

    def __init__(self, state: CoreState, hits: PendingHits) -> None:
        self._state = state
        self._hits = hits

    # -- allocations --------------------------------------------------------------------------------------------

    def allocated(self, record: RequestRecord, fact: BlocksAllocated) -> None:
        """A request without a block table got one: its hit becomes a load, or is dropped (R2)."""
        hit = self._hits.take(record, fact.external_tokens)
        record.found_tokens = record.loaded_tokens = fact.device_tokens
        if fact.external_tokens:
            self._state.requests.move(record, RequestEvent.ALLOCATE_AND_LOAD)
            self._load(record, fact, hit)
            return
        if hit is not None and hit.slots:
            self._decline(record, hit)
        self._state.requests.move(record, RequestEvent.ALLOCATE)

    def refuse(self, request: RequestId, external_tokens: int) -> None:
        """No lookup answered with these tokens, but the engine waits for them: they will not come."""
        if external_tokens:
            self._reject(RejectionCause.TOKENS_WITHOUT_PIN, request)
            self._state.results.failed.append(request)

    def _decline(self, record: RequestRecord, hit: PendingHit) -> None:
        """The engine takes nothing from the host, as its contract allows (R2)."""
        self._hits.unpin(record, hit)
        self._state.tally.events.append(HitDropped(record.request, len(hit.slots), PinDropCause.NOT_ACCEPTED))

    def _load(self, record: RequestRecord, fact: BlocksAllocated, hit: PendingHit | None) -> None:
        """Plan the load of what the engine accepted. Tokens that the host does not have fail at once."""
        state = self._state
        length = fact.device_tokens + fact.external_tokens
        if hit is None or length > hit.tokens:
            self._reject(RejectionCause.TOKENS_WITHOUT_PIN, record.request)
        may_load = state.degraded is None and not state.stall.is_on
        copies = self._copies(record, fact, length) if may_load else None
        slots, blocks = copies or ([], [])
        if hit is None or hit.slots != tuple(slots):  # else the load takes the hit's pins over
            state.pool.pin(slots)
            if hit is not None and hit.slots:
                self._unpin_hit(record, hit, slots)
        if copies is None:
            self._answer(record, record.incarnation, loaded=False)
            return
        record.loaded_tokens = length
        if slots:
            self._plan(record, slots, blocks, fact.external_tokens)
        else:
            self._answer(record, record.incarnation, loaded=True)

    def _unpin_hit(self, record: RequestRecord, hit: PendingHit, loading: Sequence[SlotId]) -> None:
        """The load takes its own pins; the part of the hit that the engine did not accept is dropped."""
        self._state.pool.unpin(hit.slots)
        if rest := len(set(hit.slots).difference(loading)):
            self._state.retention.used(record, record.found_tokens)
            self._state.tally.events.append(HitDropped(record.request, rest, PinDropCause.NOT_ACCEPTED))

    def _plan(
        self, record: RequestRecord, slots: list[SlotId], blocks: list[DeviceBlockId], tokens: int
    ) -> None:
        state = self._state
        state.leases.take(blocks)
        job = state.jobs.plan(Direction.LOAD)
        job.slots, job.blocks = slots, blocks
        job.loads_for, job.incarnation = record, record.incarnation
        job.concerns[record] = None
        record.jobs += 1
        state.shared.started(record, slots)
        state.tally.events.append(LoadScheduled(job.job, record.request, len(slots), tokens, tuple(slots)))

    def _copies(self, record: RequestRecord, fact: BlocksAllocated, length: int) -> _Copies | None:
        """Return the slots and blocks to copy for a prefix of `length` tokens, heads first; None if the host lacks any.

        It goes by key and not by what was pinned: a pinned block may have turned out worthless since, and fewer tokens
        than were found can need other blocks.
        """
        parts = self._state.pool.index.parts
        places: list[tuple[int, SlotId, DeviceBlockId]] = []
        for group, table, keys in zip(self._state.shape.groups, fact.tables, record.keys, strict=True):
            size = group.block_tokens
            first = max(group.first_needed_token(length), fact.device_tokens) // size
            for position in range(first, min(-(-length // size), len(table))):
                block = table[position]
                if block == NULL_BLOCK:
                    continue  # the engine does not read it
                key = keys[position] if position < len(keys) else None
                slot = None if key is None else parts[key[0]].get(key)
                if slot is None:
                    return None
                places.append((position * size, slot, block))
        if len(record.keys) > 1:
            places.sort(key=itemgetter(0))
        return [slot for _, slot, _ in places], [block for _, _, block in places]

    # -- endings ------------------------------------------------------------------------------------------------

    def reported(self, job: Job, part: JobReport) -> None:
        """A rank's copy has ended. What one rank finds bad no rank may use; the outcome waits for every rank (R9)."""
        if part.outcome is not CopyOutcome.DONE:
            self._distrust(job, part)
        if job.waiting:
            return
        if not job.settled:
            # With a law broken, what was loaded is not to be trusted either.
            if job.failed is None and self._state.degraded is None:
                self._arrived(job)
            else:
                corrupt = job.failed is CopyOutcome.CORRUPT
                self._failed(job, LoadOutcome.CORRUPT if corrupt else LoadOutcome.FAILED)
        self._copies_ended(job)
        self._state.jobs.close(job)

    def abandoned(self, job: Job) -> None:
        """A load did not end in time: its slots are never handed out again (R16), and its request recomputes."""
        self._note_misses(job.slots, MissCause.LOAD_FAILED)
        lost = sum(map(self._state.pool.quarantine, job.slots))
        self._state.tally.evicted(EvictionCause.ABANDONED, lost)
        self._failed(job, LoadOutcome.ABANDONED)

    def cancel_planned(self, record: RequestRecord | None = None) -> None:
        """Take back the loads that no worker knows of yet, of one request or all."""
        for job in [job for job in self._state.jobs.planned if job.loads_for is not None]:
            if record is None or job.loads_for is record:
                self._failed(job, LoadOutcome.CANCELLED)
                self._copies_ended(job)
                self._state.jobs.cancel(job)

    def fail_open(self) -> None:
        """No report of these will come: the engine recomputes, and the copies end on leased blocks."""
        for job in tuple(self._state.jobs.open.values()):
            if job.loads_for is not None and not job.settled:
                self._failed(job, LoadOutcome.FAILED)

    def _arrived(self, job: Job) -> None:
        """Every rank has copied: the request can run."""
        record, pool, shape = job.loads_for, self._state.pool, self._state.shape
        assert record is not None, job
        if shape.state_key_ends and (states := shape.count_states(map(pool.key, job.slots))):
            self._state.tally.events.append(StatesCopied(Direction.LOAD, states))
        if record.incarnation == job.incarnation and record.state < _FINISHING:
            self._state.retention.add(record, pool.pinned(job.slots))
        pool.unpin(job.slots)
        self._settle(job, LoadOutcome.LOADED)
        self._answer(record, job.incarnation, loaded=True)

    def _failed(self, job: Job, outcome: LoadOutcome) -> None:
        """The load will not come, or is not to be trusted: the engine recomputes."""
        assert job.loads_for is not None, job
        self._state.pool.unpin(job.slots)
        self._settle(job, outcome)
        self._answer(job.loads_for, job.incarnation, loaded=False)

    def _distrust(self, job: Job, part: JobReport) -> None:
        """A rank's copy failed: the slots are worthless at once, though other ranks may still read them (R4).

        Where a checksum found which blocks are corrupt, only those are lost, and their memory with them.
        """
        pool, tally = self._state.pool, self._state.tally
        if part.outcome is CopyOutcome.CORRUPT:
            slots = [job.slots[position] for position in part.corrupt] or job.slots
            self._note_misses(slots, MissCause.CORRUPT)
            tally.evicted(EvictionCause.CORRUPT, sum(map(pool.quarantine, slots)))
        else:
            self._note_misses(job.slots, MissCause.LOAD_FAILED)
            tally.evicted(EvictionCause.LOAD_FAILED, sum(map(pool.invalidate, job.slots)))

    def _copies_ended(self, job: Job) -> None:
        """No rank touches the job's memory any more: release it."""
        record = job.loads_for
        assert record is not None, job
        self._state.leases.release(job.blocks)
        job.blocks = []
        self._state.requests.job_ended(record)
        self._state.retention.release_if_over(record)

    def _note_misses(self, slots: Sequence[SlotId], cause: MissCause) -> None:
        """Keys that are about to leave the index miss for this cause from now on."""
        pool = self._state.pool
        self._state.misses.note([key for slot in slots if (key := pool.indexed_key(slot)) is not None], cause)

    def _settle(self, job: Job, outcome: LoadOutcome) -> None:
        assert job.loads_for is not None, job
        job.settled = True
        events, request = self._state.tally.events, job.loads_for.request
        corrupt = len(job.corrupt) if outcome is LoadOutcome.CORRUPT else 0
        if corrupt:
            events.append(LoadEnded(job.job, request, corrupt, outcome))
            outcome = LoadOutcome.FAILED
        if len(job.slots) > corrupt:
            events.append(LoadEnded(job.job, request, len(job.slots) - corrupt, outcome))

    def _answer(self, record: RequestRecord, incarnation: int, *, loaded: bool) -> None:
        """Answer the engine, exactly once a load, and move the request on if it still waits for this load."""
        state = self._state
        (state.results.loaded if loaded else state.results.failed).append(record.request)
        if record.state is not _LOADING or record.incarnation != incarnation:
            return
        if loaded:
            state.requests.move(record, RequestEvent.LOADED)
            return
        record.load_failed = True
        state.requests.move(record, RequestEvent.LOAD_FAILED)
        state.tables.forget(record)
        state.shared.ended(record)

    def _reject(self, cause: RejectionCause, request: RequestId) -> None:
        self._state.tally.events.append(FactRejected(cause, request))
