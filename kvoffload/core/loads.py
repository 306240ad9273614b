"""Loads: a lookup pins the slots that it finds, and the engine's allocation turns the hit into a load job.

    lookup ─▶ hit, pinned ─▶ allocated ─▶ _load ─▶ submit ─▶ reported ─▶ _arrived │ failed ─▶ _answer
                │                           └─ nothing to load, or the host lacks some of it ─▶ _answer
                └─ looked up again, the request ended, a reset: dropped

`Lookups.lookup` searches (`match.longest_match`), pins the slots it finds and keeps the answer in the request's
record (R1). The matching allocation takes the answer (`take`); a repeated lookup, the request's end or a reset drops it
(`drop`). Every load that the engine waits for gets exactly one result (`_answer`). After a failure, the engine
recomputes the tokens. Memory is released later, when every rank has ended its copy (`ended`). A prefix that is longer
than the host is loaded by several jobs (see `parts`), and the engine hears only of the last one.

Engines keep few recurrent states, and a hit needs a state at its end. If a longer hit lacks only that state, the lookup
records a *shared-prefix boundary*: the engine is asked to hand off the state at the end of the longer hit, so that the
next request with this prefix can use the longer hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from kvoffload.core.jobs import Failure, Fetch, Load
from kvoffload.core.lower_tiers import LowerTiers
from kvoffload.core.machine import RequestEvent, RequestState
from kvoffload.core.match import find_in_tail, longest_match
from kvoffload.core.parts import Parts
from kvoffload.core.planners import StorePlanner
from kvoffload.core.request import PendingHit, RequestRecord, Rest, from_fields
from kvoffload.core.state import CoreState, LoadResults
from kvoffload.core.stores import MISS_CAUSES
from kvoffload.model import events
from kvoffload.model.causes import (
    CopyOutcome,
    Deferral,
    EvictionCause,
    LoadOutcome,
    MissCause,
    PinDropCause,
    RejectionCause,
)
from kvoffload.model.facts import BlocksAllocated
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId, JobId, Rank, RequestId, SlotId
from kvoffload.model.wire import Direction, JobReport, Tier

_LOADING, _RUNNING, _FINISHING = RequestState.LOADING, RequestState.RUNNING, RequestState.FINISHING
_Copies = tuple[list[SlotId], list[DeviceBlockId]]
_hit = from_fields(PendingHit)


class Lookups:
    """Answers lookups. The only writer of `RequestRecord.hit` and `boundary`."""

    def __init__(self, state: CoreState, lower_tiers: LowerTiers, parts: Parts) -> None:
        self._state = state
        self._in_flight = state.in_flight
        self._lower_tiers = lower_tiers
        self._parts = parts

    def lookup(
        self, record: RequestRecord, device_tokens: int, full_tokens: int = 0, *, may_wait: bool
    ) -> int | None:
        """Return how many tokens the host adds to the device's hit, and pin their slots. None means "not yet".

        A request may look up any number of times. An engine asks again in every step in which it cannot allocate. If a
        new search would find the same, the last lookup's slots stay pinned; otherwise they are dropped.
        """
        state = self._state
        if record.hit is not None and self._keeps(record, record.hit, device_tokens, full_tokens):
            return record.hit.tokens - device_tokens
        if (
            record.awaits_fetch is not None
            and may_wait
            and self._lower_tiers.is_awaited(record, device_tokens)
        ):
            self._not_yet(record, Deferral.FETCH)
            return None
        record.boundary = 0
        hit = self._search(record, device_tokens, full_tokens)
        if state.tiers and hit.missing is not None and record.persists:
            if (self._lower_tiers.look(record, hit) or record.awaits_answer) and may_wait:
                self._not_yet(record, Deferral.FETCH)
                return None
            hit = self._with_tiers(record, hit, may_wait=may_wait)
        if hit.slots and state.requests.reserved:
            allowed = self._beside_loads(record, hit, may_wait=may_wait)
            if allowed is None:
                return None
            hit = allowed
        if hit.slots:
            state.pool.pin(hit.slots)
            event = events.HitPinned(
                record.request, len(hit.slots), device_tokens, hit.tokens - device_tokens
            )
            state.tally.events.append(event)
        record.hit = hit
        record.waits_for = None
        return hit.tokens - device_tokens

    def _with_tiers(self, record: RequestRecord, hit: PendingHit, *, may_wait: bool) -> PendingHit:
        """Return a hit with the rest of a prefix that is longer than the host, and with the tiers' reason for the miss."""
        if hit.slots and may_wait:
            hit = self._with_rest(record, hit)
        missing, tiers = hit.missing, self._state.tiers
        if missing is None:
            return hit
        for tier in tiers:
            if missing in tier.pool.index.parts[missing[0]]:
                return hit._replace(cause=self._lower_tiers.cause(record, tier, missing))
        if hit.cause in (MissCause.NEVER_SEEN, MissCause.EVICTED):
            for tier in tiers:
                if tier.tier.has_slots and not (tier.is_open or tier.is_closed):
                    return hit._replace(cause=MissCause.TIER_OPENING)
        return hit

    def _with_rest(self, record: RequestRecord, hit: PendingHit) -> PendingHit:
        found = self._parts.find(record, hit)
        if found is None:
            return hit
        is_limited = record.longest_hit(hit.device_tokens, self._state.shape) < record.prompt_tokens - 1
        cause = self._cause(record, found.tokens, found.missing, is_limited=is_limited)
        rest = found.tokens - hit.tokens
        return hit._replace(tokens=found.tokens, cause=cause, missing=found.missing, rest_tokens=rest)

    def _keeps(self, record: RequestRecord, hit: PendingHit, device_tokens: int, full_tokens: int) -> bool:
        """Keep the last lookup's answer and return True, or drop it and return False."""
        if not self._is_same(record, hit, device_tokens, full_tokens):
            self.drop(record, PinDropCause.LOOKED_UP_AGAIN)
            return False
        if device_tokens:
            # The tail of the prefix is pinned; its head on the host must not be evicted before it (R15).
            self._state.retention.used(record, device_tokens)
        return True

    def _is_same(self, record: RequestRecord, hit: PendingHit, device_tokens: int, full_tokens: int) -> bool:
        """Return whether a search would find what the last lookup found and pinned, and nothing forbids its load.

        While requests load, a search also looks whether this request must wait for them.
        """
        state, pool, missing = self._state, self._state.pool, hit.missing
        if state.degraded is not None or state.stall.is_on or state.requests.reserved:
            return False
        was, now = (hit.device_tokens, hit.prompt_tokens), (device_tokens, record.prompt_tokens)
        if not hit.slots or was != now or hit.losses != pool.losses or record.load_failed:
            return False
        if not state.shape.is_one_full_group:
            return hit.fills == pool.fills and not (full_tokens or record.boundary or state.tiers)
        # Only the block after the hit could make it longer.
        if missing is None:
            return True
        return missing not in pool.index and not self._lower_tiers.may_have(record, missing)

    def _beside_loads(self, record: RequestRecord, hit: PendingHit, *, may_wait: bool) -> PendingHit | None:
        """Return what a request may load while others load or wait to run after their load; None for "not yet".

        A request waits while another request loads the same prefix (R14), and while the device has too little room for
        all requests with loads (R19). A request that may not wait for room computes its tokens: while it runs, the
        engine can take its blocks.
        """
        state = self._state
        owner = state.requests.loader(hit.slots) if may_wait else None
        if owner is not None:
            self._not_yet(record, Deferral.OTHERS_LOAD, owner)
            return None
        usable = state.shape.device_blocks - state.stall.blocks
        if state.requests.has_room(state.shape.request_blocks(record.prompt_tokens), usable):
            return hit
        if may_wait:
            self._not_yet(record, Deferral.ROOM)
            return None
        return PendingHit(hit.device_tokens, hit.device_tokens, (), MissCause.NO_ROOM)

    def _not_yet(self, record: RequestRecord, reason: Deferral, owner: RequestId | None = None) -> None:
        """Report that a request waits, once per wait, however often the engine looks up."""
        cause: RequestId | JobId | Tier | None = owner
        if reason is Deferral.ROOM:
            cause = Tier.DEVICE
        elif owner is None:
            cause = Tier.HOST if record.awaits_fetch is None else record.awaits_fetch[0]
        if record.waits_for != cause:
            record.waits_for = cause
            self._state.tally.events.append(events.LookupDeferred(record.request, reason, owner))

    def boundary_stored(self, record: RequestRecord) -> None:
        """Record that the engine handed off the state at a request's shared-prefix boundary."""
        self._state.tally.events.append(events.BoundaryMade(record.request, record.boundary))
        record.boundary = 0

    def take(self, record: RequestRecord, accepted_tokens: int) -> PendingHit | None:
        """Remove the last lookup's answer from the record, report it and return it; None if there is no answer.

        The caller unpins the answer's slots. The report counts the block positions after the device's own hit, and
        counts a position as a hit only if the engine accepted it. The engine may decline the end of a hit, or the whole
        hit if it uses another connector's hit instead.
        """
        hit, record.hit = record.hit, None
        if hit is None:
            return None
        if record.boundary:
            self._state.tally.events.append(events.BoundaryAsked(record.request, record.boundary))
        device_tokens, reached, _, cause, *_ = hit
        alignment = self._state.shape.alignment
        end = max(record.prompt_tokens, reached)
        tokens = min(reached, device_tokens + accepted_tokens)
        if tokens < reached:
            cause = MissCause.NOT_ACCEPTED
        found = -(-(tokens - device_tokens) // alignment)
        missed = -(-(end - tokens) // alignment)
        tally = self._state.tally
        answered = record.request, device_tokens, found, missed, tokens - device_tokens, end - tokens
        fetched: tuple[tuple[Tier, int], ...] = ()
        if record.fetched_from and tokens > device_tokens:
            by_tier = record.fetched_tokens(device_tokens, tokens, self._state.shape)
            fetched = tuple(by_tier.items())
        tally.events.append(
            events.LookupAnswered(*answered, cause if missed else None, fetched, not record.reads_cache)
        )
        return hit

    def drop(self, record: RequestRecord, cause: PinDropCause) -> None:
        """Drop the last lookup's answer, if there is one, and unpin the slots that the lookup found."""
        hit, record.hit = record.hit, None
        if hit is not None and hit.slots:
            self._state.pool.unpin(hit.slots)
            self._state.retention.used(record, hit.device_tokens)
            self._state.tally.events.append(events.HitDropped(record.request, len(hit.slots), cause))

    def _search(self, record: RequestRecord, device_tokens: int, full_tokens: int) -> PendingHit:
        """Return the answer to a lookup, without pinning its slots."""
        state = self._state
        if not record.reads_cache:
            return PendingHit(device_tokens, device_tokens, (), None)
        if record.load_failed:
            return PendingHit(device_tokens, device_tokens, (), MissCause.LOAD_FAILED)
        if state.degraded is not None:
            return PendingHit(device_tokens, device_tokens, (), MissCause.DEGRADED)
        if state.stall.is_on:
            return PendingHit(device_tokens, device_tokens, (), MissCause.STALLED)
        last = record.prompt_tokens - 1
        is_free = record.limits.load_tokens is None
        limit = last if is_free else record.longest_hit(device_tokens, state.shape)
        tokens, slots, missing, lacks_state, full_tokens = longest_match(
            state.shape, record.keys, state.pool.index, device_tokens, limit, full_tokens, record.hashes
        )
        if full_tokens > tokens and state.policy.prefix_boundaries:
            record.boundary = full_tokens
        if 0 < tokens - device_tokens < record.least_tokens:
            return PendingHit(device_tokens, device_tokens, (), MissCause.LOAD_DECLINED, missing)
        cause = self._cause(record, tokens, missing, is_limited=limit < last)
        if lacks_state and cause is MissCause.NEVER_SEEN:
            cause = MissCause.NO_STATE
        pool = state.pool
        return _hit(
            (device_tokens, tokens, slots, cause, missing, record.prompt_tokens, pool.losses, pool.fills, 0)
        )

    def _cause(
        self, record: RequestRecord, tokens: int, missing: BlockKey | None, *, is_limited: bool
    ) -> MissCause | None:
        """Return why the first block position after a match missed, or None if there is no such position."""
        lacking, alignment = record.prompt_tokens - tokens, self._state.shape.alignment
        if lacking <= 0:
            return None
        if lacking < alignment:
            return MissCause.PARTIAL_BLOCK
        if missing is None and is_limited:
            return MISS_CAUSES[record.limits.counts_as]
        if missing is None:
            return MissCause.LAST_TOKEN if lacking == alignment else MissCause.LOOKAHEAD
        if missing in self._in_flight.keys:
            return MissCause.STORING
        return self._state.misses.cause(missing)


class Loads:
    """Plans and owns loads.

    Args:
        state: the core's state.
        hits: the answers to lookups that wait for an allocation.
        parts: fetches the rest of long prefixes.
        planner: the store planner, called after each successful load. `OffloadCore` may replace it.
    """

    def __init__(self, state: CoreState, hits: Lookups, parts: Parts, planner: StorePlanner) -> None:
        self._state = state
        self._hits = hits
        self._parts = parts
        self.planner = planner

    # -- allocations --------------------------------------------------------------------------------------------

    def allocated(self, record: RequestRecord, fact: BlocksAllocated) -> None:
        """Load a request's hit into its new block table, or drop the hit if the engine declined it (R2)."""
        hit = self._hits.take(record, fact.external_tokens)
        record.found_tokens = record.loaded_tokens = fact.device_tokens
        if fact.external_tokens:
            requests, shape = self._state.requests, self._state.shape
            requests.move(record, RequestEvent.ALLOCATE_AND_LOAD)
            requests.reserve(record, shape.request_blocks(record.prompt_tokens))
            self._load(record, fact, hit)
            return
        if hit is not None and hit.slots:
            # The engine may decline a whole hit (R2).
            self._unpin_hit(record, hit, ())
        self._state.requests.move(record, RequestEvent.ALLOCATE)

    def refuse(self, request: RequestId, external_tokens: int) -> None:
        """Report a load as failed if the engine waits for tokens that no lookup returned."""
        if external_tokens:
            self._state.tally.rejected(RejectionCause.TOKENS_WITHOUT_PIN, request)
            self._state.results.failed.append(request)

    def _load(self, record: RequestRecord, fact: BlocksAllocated, hit: PendingHit | None) -> None:
        """Plan a load of the tokens that the engine accepted. If the host lacks one of the blocks, the load fails."""
        state = self._state
        length = fact.device_tokens + fact.external_tokens
        if hit is None or length > hit.tokens:
            self._state.tally.rejected(RejectionCause.TOKENS_WITHOUT_PIN, record.request)
        head = length
        if hit is not None and hit.rest_tokens:
            head = min(length, hit.tokens - hit.rest_tokens)
        may_load = state.degraded is None and not state.stall.is_on
        copies = self._copies(record, fact, hit, head) if may_load else None
        slots, blocks = copies or ([], [])
        if hit is None or hit.slots != tuple(slots):  # A load of the whole hit takes over the hit's pins.
            state.pool.pin(slots)
            if hit is not None and hit.slots:
                self._unpin_hit(record, hit, slots)
        if copies is None:
            self._answer(record, record.incarnation, loaded=False)
            return
        record.loaded_tokens = length
        if slots:
            if head < length:
                size = state.shape.alignment
                places = slice(head // size, -(-length // size))
                record.rest = Rest(record.keys[0][places], list(fact.tables[0][places]), state.epoch)
            self._plan(record, slots, blocks, head - fact.device_tokens)
        else:
            self._answer(record, record.incarnation, loaded=head == length)

    def _unpin_hit(self, record: RequestRecord, hit: PendingHit, loading: Sequence[SlotId]) -> None:
        """Unpin a hit's slots, so that the deepest are evicted first (R15). Report how many are not in `loading`."""
        self._state.pool.unpin(hit.slots)
        if rest := len(set(hit.slots).difference(loading)):
            self._state.retention.used(record, record.found_tokens)
            self._state.tally.events.append(
                events.HitDropped(record.request, rest, PinDropCause.NOT_ACCEPTED)
            )

    def _plan(
        self, record: RequestRecord, slots: list[SlotId], blocks: list[DeviceBlockId], tokens: int
    ) -> None:
        state = self._state
        state.leases.take(blocks)
        rest = record.rest
        waits = record.request if rest is None or not rest.keys else None
        job = Load(self, slots, blocks, waits, record=record, incarnation=record.incarnation)
        job.concerns[record] = None
        state.jobs.plan(job)
        if rest is not None:
            rest.job = rest.load = job.id
        state.requests.loads(record, slots)
        state.tally.events.append(
            events.LoadScheduled(job.id, record.request, len(slots), tokens, tuple(slots))
        )
        if state.pool.adopted and (adopted := state.pool.read(slots)):
            state.tally.events.append(events.AdoptedBlocksHit(adopted))

    def _copies(
        self, record: RequestRecord, fact: BlocksAllocated, hit: PendingHit | None, length: int
    ) -> _Copies | None:
        """Return the host slots and device blocks of a load, heads first; None if the host lacks one of the blocks.

        Slots are looked up by key again if a pinned slot may have been invalidated since the lookup, and for a part of
        the hit, which can need different blocks.

        Args:
            record: the request.
            fact: the allocation, with the request's new block table.
            hit: the answer to the request's last lookup; None if there was none.
            length: the length of the prefix in tokens, including the device's own hit.
        """
        if hit is not None and (of_hit := self._copies_of_hit(fact, hit, length)) is not None:
            return of_hit
        index, shape = self._state.pool.index, self._state.shape
        copies: list[tuple[int, SlotId, DeviceBlockId]] = []
        for group, table, keys in zip(shape.groups, fact.tables, record.keys, strict=True):
            size = group.block_tokens
            first = max(group.first_needed_token(length), fact.device_tokens) // size
            for position in range(first, min(-(-length // size), len(table))):
                block = table[position]
                if block == NULL_BLOCK:
                    continue  # The engine allocates no block for a position that it does not read.
                if (position + 1) * size > length:
                    slot = find_in_tail(shape, group, keys, record.hashes, length, index)
                else:
                    key = keys[position] if position < len(keys) else None
                    slot = None if key is None else index.parts[key[0]].get(key)
                if slot is None:
                    return None
                copies.append((position * size, slot, block))
        if len(record.keys) > 1:
            copies.sort(key=itemgetter(0))
        return [slot for _, slot, _ in copies], [block for _, _, block in copies]

    def _copies_of_hit(self, fact: BlocksAllocated, hit: PendingHit, length: int) -> _Copies | None:
        """Return the copies of a whole hit in a model with a single full-attention group, if its slots are unchanged."""
        shape, pool = self._state.shape, self._state.pool
        if (
            not shape.is_one_full_group
            or hit.losses != pool.losses
            or fact.device_tokens != hit.device_tokens
        ):
            return None
        size, blocks = shape.alignment, fact.tables[0]
        blocks = blocks[fact.device_tokens // size : -(-length // size)]
        if len(blocks) != len(hit.slots) or NULL_BLOCK in blocks:
            return None
        return list(hit.slots), list(blocks)

    # -- endings ------------------------------------------------------------------------------------------------

    def take_results(self) -> LoadResults:
        """Return the loads that ended since the last call."""
        results, self._state.results = self._state.results, LoadResults()
        return results

    def reported(self, job: Load, rank: Rank, report: JobReport) -> None:
        """Invalidate the host slots that a rank could not load. The load ends after every rank's report (R9)."""
        if report.corrupt:
            job.corrupt.update(report.corrupt)
        if report.outcome is not CopyOutcome.DONE:
            self._distrust(job, report)

    def failed(self, job: Load, why: Failure) -> None:
        """Report a failed load, whose tokens the engine recomputes. After a timeout, quarantine its slots (R16)."""
        pool = self._state.pool
        if why is Failure.TIMED_OUT:
            self._note_misses(job.slots, MissCause.LOAD_FAILED)
            self._state.tally.evicted(EvictionCause.ABANDONED, sum(map(pool.quarantine, job.slots)))
        pool.unpin(job.slots)
        job.settled = True
        tally = self._state.tally
        request = job.record.request
        outcome = why.of_load
        corrupt = len(job.corrupt) if why is Failure.CORRUPT else 0
        if corrupt:
            tally.events.append(events.LoadEnded(job.id, request, corrupt, outcome))
            outcome = LoadOutcome.FAILED
        if len(job.slots) > corrupt:
            tally.events.append(events.LoadEnded(job.id, request, len(job.slots) - corrupt, outcome))
        self._answer(job.record, job.incarnation, loaded=False)

    def ended(self, job: Load) -> None:
        """Release a job's memory after every rank has ended its copy."""
        state, record = self._state, job.record
        if not job.settled:
            # After a broken invariant, the bytes of a successful load may be wrong, too.
            if job.failed is None and state.degraded is None:
                self._arrived(job)
            else:
                is_corrupt = job.failed is CopyOutcome.CORRUPT
                self.failed(job, Failure.CORRUPT if is_corrupt else Failure.FAILED)
        state.leases.release(job.targets)
        state.requests.job_ended(record)
        state.retention.release_if_over(record)

    def _arrived(self, job: Load) -> None:
        """Report a load that succeeded on every rank, so that the request can run."""
        record, pool, shape = job.record, self._state.pool, self._state.shape
        if shape.state_key_ends and (states := shape.count_states(map(pool.key, job.slots))):
            self._state.tally.events.append(events.StatesCopied(Direction.LOAD, states))
        if record.incarnation == job.incarnation and record.state < _FINISHING:
            self._state.retention.add(record, pool.pinned(job.slots))
        pool.unpin(job.slots)
        event = events.LoadEnded(job.id, record.request, len(job.slots), LoadOutcome.LOADED, job.copy_s)
        self._state.tally.events.append(event)
        if job.extra is None:
            self._parts.make_room(record, job.slots)
            self.go_on(record, job)
            return
        self._answer(record, job.incarnation, loaded=True)
        if record.incarnation == job.incarnation and record.state is _RUNNING:
            self.planner.loaded(record)

    def _distrust(self, job: Load, report: JobReport) -> None:
        """Invalidate a load's host slots after one rank's copy failed, even while other ranks read them (R4).

        If the rank found wrong checksums, quarantine the corrupt slots instead.
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
        """Record why the keys in these slots will miss. Call this method before invalidating the slots."""
        pool = self._state.pool
        self._state.misses.note([key for slot in slots if (key := pool.indexed_key(slot)) is not None], cause)

    def _answer(self, record: RequestRecord, incarnation: int, *, loaded: bool) -> None:
        """Report a load's end to the engine, once per load. Update the request if it still waits for the load."""
        state = self._state
        (state.results.loaded if loaded else state.results.failed).append(record.request)
        if record.incarnation == incarnation:
            record.rest = None
        if record.state is not _LOADING or record.incarnation != incarnation:
            return
        if loaded:
            state.requests.move(record, RequestEvent.LOADED)
            return
        record.load_failed = True
        state.requests.move(record, RequestEvent.LOAD_FAILED)
        state.tables.forget(record)

    # -- loads in parts -----------------------------------------------------------------------------------------

    def go_on(self, record: RequestRecord, job: Load | Fetch) -> None:
        """Plan the next part of a request's load, if the part waits for this job."""
        rest = record.rest
        if rest is None or rest.job != job.id:
            return
        slots = self._parts.next(record) if record.state is _LOADING else None
        if slots is None:
            self._fail_rest(record, rest)
        elif slots:
            count = len(slots)
            blocks = rest.blocks[:count]
            del rest.keys[:count], rest.blocks[:count]
            self._state.pool.pin(slots)
            self._plan(record, list(slots), blocks, count * self._state.shape.alignment)

    def stop(self, record: RequestRecord) -> None:
        """Report a request's load as failed if its next part waits for a fetch. A part that is being loaded ends first."""
        rest = record.rest
        if rest is not None and not isinstance(self._state.jobs.open.get(rest.job), Load):
            self._fail_rest(record, rest)

    def _fail_rest(self, record: RequestRecord, rest: Rest) -> None:
        event = events.LoadEnded(rest.load, record.request, 0, LoadOutcome.FAILED)
        self._state.tally.events.append(event)
        self._answer(record, record.incarnation, loaded=False)
