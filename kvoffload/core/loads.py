"""Loads: an allocation turns a pending hit into a load job, workers copy it, and its request runs or recomputes.

    allocated ─▶ _load ─▶ submit ─▶ reported ─▶ _arrived │ failed ─▶ _answer
                   └─ nothing to load, or not to be had ─▶ _answer

Every load that the engine waits for is answered exactly once (`_answer`). Memory is released later, when every rank has
ended its copy (`ended`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from kvoffload.core.jobs import Failure, Load
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
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId, Rank, RequestId, SlotId
from kvoffload.model.transfer import Direction, JobReport

_LOADING, _RUNNING, _FINISHING = RequestState.LOADING, RequestState.RUNNING, RequestState.FINISHING
_Copies = tuple[list[SlotId], list[DeviceBlockId]]


class Loads:
    """Plans and owns loads.

    Args:
        state: the core's.
        hits: what lookups found.
        loaded: called with a request whose load ended well.
    """

    def __init__(
        self, state: CoreState, hits: PendingHits, loaded: Callable[[RequestRecord], object]
    ) -> None:
        self._state = state
        self._hits = hits
        self._loaded = loaded

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
        job = Load(
            self,
            slots,
            blocks,
            record.request,
            concerns={record: None},
            record=record,
            incarnation=record.incarnation,
        )
        state.jobs.plan(job)
        record.jobs += 1
        state.shared.started(record, slots)
        state.tally.events.append(LoadScheduled(job.id, record.request, len(slots), tokens, tuple(slots)))

    def _copies(self, record: RequestRecord, fact: BlocksAllocated, length: int) -> _Copies | None:
        """Return the slots and blocks to copy for a prefix of `length` tokens, heads first; None if the host lacks any.

        Blocks are found by key and not by what was pinned: a pinned block may have been invalidated since, and fewer tokens
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

    def reported(self, job: Load, rank: Rank, report: JobReport) -> None:
        """Note what a rank found bad: no rank may use it. The outcome waits for every rank (R9)."""
        job.corrupt.update(report.corrupt)
        if report.outcome is not CopyOutcome.DONE:
            self._distrust(job, report)

    def failed(self, job: Load, why: Failure) -> None:
        """The load will not come, or cannot be trusted: the engine recomputes.

        After a time-out the slots are never allocated again (R16).
        """
        pool = self._state.pool
        if why is Failure.TIMED_OUT:
            self._note_misses(job.slots, MissCause.LOAD_FAILED)
            self._state.tally.evicted(EvictionCause.ABANDONED, sum(map(pool.quarantine, job.slots)))
        pool.unpin(job.slots)
        job.settled = True
        events, request, outcome = self._state.tally.events, job.record.request, _OUTCOMES[why]
        corrupt = len(job.corrupt) if why is Failure.CORRUPT else 0
        if corrupt:
            events.append(LoadEnded(job.id, request, corrupt, outcome))
            outcome = LoadOutcome.FAILED
        if len(job.slots) > corrupt:
            events.append(LoadEnded(job.id, request, len(job.slots) - corrupt, outcome))
        self._answer(job.record, job.incarnation, loaded=False)

    def ended(self, job: Load) -> None:
        """No rank touches the job's memory any more: release it."""
        state, record = self._state, job.record
        if not job.settled:
            # After an invariant was broken, what was loaded is not trusted either.
            if job.failed is None and state.degraded is None:
                self._arrived(job)
            else:
                is_corrupt = job.failed is CopyOutcome.CORRUPT
                self.failed(job, Failure.CORRUPT if is_corrupt else Failure.FAILED)
        state.leases.release(job.targets)
        state.requests.job_ended(record)
        state.retention.release_if_over(record)

    def _arrived(self, job: Load) -> None:
        """Every rank has copied: the request can run."""
        record, pool, shape = job.record, self._state.pool, self._state.shape
        if shape.state_key_ends and (states := shape.count_states(map(pool.key, job.slots))):
            self._state.tally.events.append(StatesCopied(Direction.LOAD, states))
        if record.incarnation == job.incarnation and record.state < _FINISHING:
            self._state.retention.add(record, pool.pinned(job.slots))
        pool.unpin(job.slots)
        job.settled = True
        event = LoadEnded(job.id, record.request, len(job.slots), LoadOutcome.LOADED)
        self._state.tally.events.append(event)
        self._answer(record, job.incarnation, loaded=True)
        if record.incarnation == job.incarnation and record.state is _RUNNING:
            self._loaded(record)

    def _distrust(self, job: Load, report: JobReport) -> None:
        """A rank's copy failed: invalidate the slots at once, though other ranks may still read them (R4).

        If a checksum showed which blocks are corrupt, only those are lost, and their slots are never allocated again.
        """
        pool, tally = self._state.pool, self._state.tally
        if report.outcome is CopyOutcome.CORRUPT:
            slots = [job.slots[position] for position in report.corrupt] or job.slots
            self._note_misses(slots, MissCause.CORRUPT)
            tally.evicted(EvictionCause.CORRUPT, sum(map(pool.quarantine, slots)))
        else:
            self._note_misses(job.slots, MissCause.LOAD_FAILED)
            tally.evicted(EvictionCause.LOAD_FAILED, sum(map(pool.invalidate, job.slots)))

    def _note_misses(self, slots: Sequence[SlotId], cause: MissCause) -> None:
        """Keys that are about to leave the index miss for this cause from now on."""
        pool = self._state.pool
        self._state.misses.note([key for slot in slots if (key := pool.indexed_key(slot)) is not None], cause)

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


_OUTCOMES = {
    Failure.FAILED: LoadOutcome.FAILED,
    Failure.CORRUPT: LoadOutcome.CORRUPT,
    Failure.TIMED_OUT: LoadOutcome.ABANDONED,
    Failure.CANCELLED: LoadOutcome.CANCELLED,
    Failure.DROPPED: LoadOutcome.FAILED,
}
