"""Lookups, and the pending hits that they leave (R1): what a request's last lookup found, pinned until consumed.

A lookup goes through `PendingHits.lookup`, which searches (`match.longest_match`), pins what it found and keeps the
answer in the request's record. The matching allocation takes the answer (`take`); a repeated lookup, the request's end or
a reset drops it (`drop`).

Engines keep few recurrent states, and a hit needs one at its end. If only that state is missing for a longer hit, the lookup
notes a *shared-prefix boundary* in the record: if the engine hands off its state after these tokens, the next request with
that prefix finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvoffload.core.match import longest_match
from kvoffload.core.request import PendingHit, RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.stores import InFlight
from kvoffload.core.tier_copies import FetchPlanner
from kvoffload.model.causes import MissCause, PinDropCause
from kvoffload.model.events import (
    HitDropped,
    HitPinned,
    JunctionAsked,
    JunctionMade,
    LookupAnswered,
    LookupDeferred,
)
from kvoffload.model.ids import BlockKey, JobId, RequestId, SlotId
from kvoffload.model.transfer import Tier

_Fields = tuple[int, int, tuple[SlotId, ...], MissCause | None, BlockKey | None]
_hit: Callable[[_Fields], PendingHit] = partial(tuple.__new__, PendingHit)
"""Once a lookup: a named tuple's own call takes three times as long."""


class PendingHits:
    """Answers lookups. The only writer of `RequestRecord.hit` and `boundary`."""

    def __init__(self, state: CoreState, in_flight: InFlight, fetches: FetchPlanner | None = None) -> None:
        self._state = state
        self._in_flight = in_flight
        self._fetches = fetches

    def lookup(
        self, record: RequestRecord, device_tokens: int, full_tokens: int = 0, *, may_wait: bool
    ) -> int | None:
        """Return the tokens that the host adds to the device's, pinned until consumed; None for "not yet".

        A request may look up any number of times: each lookup drops what the last one had pinned.
        """
        state = self._state
        if record.hit is not None:
            self.drop(record, PinDropCause.LOOKED_UP_AGAIN)
        if record.awaits_fetch is not None and may_wait and self._awaits_fetch(record, device_tokens):
            self._not_yet(record)
            return None
        record.boundary = 0
        hit = self._search(record, device_tokens, full_tokens)
        slots = hit.slots
        if self._fetches is not None and hit.missing is not None and record.persists:
            if (self._fetches.look(record, hit) or record.awaits_answer) and may_wait:
                self._not_yet(record)
                return None
            cause = self._fetches.cause(hit.missing, hit.cause)
            if cause is not hit.cause:
                hit = hit._replace(cause=cause)
        if slots:
            owner = state.shared.owner(slots) if may_wait and state.shared.owners else None
            if owner is not None:
                self._not_yet(record, owner)
                return None
            state.pool.pin(slots)
            event = HitPinned(record.request, len(slots), device_tokens, hit.tokens - device_tokens)
            state.tally.events.append(event)
        record.hit = hit
        record.waits_for = None
        return hit.tokens - device_tokens

    def _not_yet(self, record: RequestRecord, owner: RequestId | None = None) -> None:
        """Report that a request waits: once for each load, fetch or store's answer, however often the engine asks.

        Args:
            record: which.
            owner: the request that loads what it waits for; None where that comes from a lower tier.
        """
        cause: RequestId | JobId | Tier | None = owner
        if owner is None:
            cause = Tier.REMOTE if record.awaits_fetch is None else record.awaits_fetch[0]
        if record.waits_for != cause:
            record.waits_for = cause
            self._state.tally.events.append(LookupDeferred(record.request, owner))

    def _awaits_fetch(self, record: RequestRecord, device_tokens: int) -> bool:
        return self._fetches is not None and self._fetches.is_awaited(record, device_tokens)

    def boundary_stored(self, record: RequestRecord) -> None:
        """Note that the engine handed off the state that a request was to leave at its shared-prefix boundary."""
        self._state.tally.events.append(JunctionMade(record.request, record.boundary))
        record.boundary = 0

    def take(self, record: RequestRecord, accepted_tokens: int) -> PendingHit | None:
        """An admission consumes the last lookup's answer, which counts now; the caller unpins its slots.

        Counted are block positions behind what the device held. A hit is what the engine accepted of it: it may decline
        all of it, where another connector's hit came first, or its end. None where nothing was looked up.
        """
        hit, record.hit = record.hit, None
        if hit is None:
            return None
        if record.boundary:
            self._state.tally.events.append(JunctionAsked(record.request, record.boundary))
        device_tokens, reached, slots, cause, _ = hit
        alignment = self._state.shape.alignment
        end = max(record.prompt_tokens, reached)
        tokens = min(reached, device_tokens + accepted_tokens)
        if tokens < reached:
            cause = MissCause.NOT_ACCEPTED
        found = -(-(tokens - device_tokens) // alignment)
        missed = -(-(end - tokens) // alignment)
        events = self._state.tally.events
        answered = record.request, device_tokens, found, missed, tokens - device_tokens, end - tokens
        if not missed:
            cause = None
        if record.fetched_blocks and slots:
            fetched = (tokens - device_tokens) * min(record.fetched_blocks, len(slots)) // len(slots)
            events.append(LookupAnswered(*answered, cause, fetched, record.fetched_from))
        else:
            events.append(LookupAnswered(*answered, cause))
        return hit

    def drop(self, record: RequestRecord, cause: PinDropCause) -> None:
        """Forget the last lookup's answer, if there is one, and unpin what it found."""
        hit, record.hit = record.hit, None
        if hit is not None and hit.slots:
            self.unpin(record, hit)
            self._state.tally.events.append(HitDropped(record.request, len(hit.slots), cause))

    def unpin(self, record: RequestRecord, hit: PendingHit) -> None:
        """Unpin a hit that will not be loaded: what the device holds of the prefix is evicted after it (R15)."""
        self._state.pool.unpin(hit.slots)
        self._state.retention.used(record, hit.device_tokens)

    def _search(self, record: RequestRecord, device_tokens: int, full_tokens: int) -> PendingHit:
        """Return a lookup's answer, not yet pinned."""
        state = self._state
        if not record.reads_cache:
            return PendingHit(device_tokens, device_tokens, (), MissCause.OPTED_OUT)
        if record.load_failed:
            return PendingHit(device_tokens, device_tokens, (), MissCause.LOAD_FAILED)
        if state.degraded is not None:
            return PendingHit(device_tokens, device_tokens, (), MissCause.DEGRADED)
        if state.stall.is_on:
            return PendingHit(device_tokens, device_tokens, (), MissCause.STALLED)
        limit = record.prompt_tokens - 1
        tokens, slots, missing, lacks_state, full_tokens = longest_match(
            state.shape, record.keys, state.pool.index, device_tokens, limit, full_tokens
        )
        if full_tokens > tokens and state.policy.prefix_junctions:
            record.boundary = full_tokens
        if 0 < tokens - device_tokens < record.least_tokens:
            return PendingHit(device_tokens, device_tokens, (), MissCause.LOAD_DECLINED, missing)
        cause = self._cause(record, tokens, missing)
        if lacks_state and cause is MissCause.NEVER_SEEN:
            cause = MissCause.NO_STATE
        return _hit((device_tokens, tokens, slots, cause, missing))

    def _cause(self, record: RequestRecord, tokens: int, missing: BlockKey | None) -> MissCause | None:
        """Return why the block position behind a match missed, None where no position is left."""
        lacking, alignment = record.prompt_tokens - tokens, self._state.shape.alignment
        if lacking <= 0:
            return None
        if lacking < alignment:
            return MissCause.PARTIAL_BLOCK
        if missing is None:
            return MissCause.LAST_TOKEN if lacking == alignment else MissCause.READ_AHEAD
        if missing in self._in_flight.keys:
            return MissCause.STORING
        return self._state.misses.cause(missing)
