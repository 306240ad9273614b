"""The lookup desk: what the host adds to the device's prefix, and the pins that a lookup leaves (R1).

On an engine that cannot recover a load, a lookup that finds blocks which were not checked pins them, has them checked, and
answers "not yet"; one that may not wait any longer promises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.core.check_desk import CheckDesk
from kvoffload.core.lookup import longest_match
from kvoffload.core.pending_hits import PendingHit
from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.states import RequestState
from kvoffload.model.causes import MissCause, PinDropCause, SurpriseCause
from kvoffload.model.events import EngineSurprised, HitDropped, HitPinned, LookupDeferred, LookupSettled
from kvoffload.model.ids import BlockKey, RequestId, SlotId


class _Answer(NamedTuple):
    tokens: int  # that device and host hold together
    slots: tuple[SlotId, ...]  # to pin, heads first
    cause: MissCause | None  # why the block position behind `tokens` missed


class LookupDesk:
    """Answers lookups."""

    def __init__(self, state: CoreState, checks: CheckDesk) -> None:
        self._state = state
        self._checks = checks

    def lookup(self, request: RequestId, device_tokens: int, *, may_wait: bool) -> int | None:
        """Return the tokens that the host adds to the device's, pinned until consumed; None for "not yet".

        Any number of times: each lookup drops what the one before had pinned.
        """
        state = self._state
        record = state.requests.live(request)
        if record is None or record.state is not RequestState.SEEN:
            state.outbox.put(EngineSurprised(SurpriseCause.UNKNOWN_REQUEST, request))
            return 0
        tokens, slots, cause = self._search(record, device_tokens)
        unchecked = state.checked.unchecked(slots)
        if unchecked and not may_wait:
            tokens, slots, cause = device_tokens, (), MissCause.NOT_CHECKED
        self.drop(request, PinDropCause.LOOKED_UP_AGAIN)
        owner = state.shared.owner(slots) if may_wait else None
        if owner is not None:
            state.outbox.put(LookupDeferred(request, owner))
            return None
        pins = None
        if slots:
            pins = state.pool.pin(slots)
            state.outbox.put(HitPinned(request, len(slots), device_tokens, tokens - device_tokens))
        state.hits.put(request, PendingHit(device_tokens, tokens, pins, cause))
        if state.checked.is_needed and slots:
            return self._if_checked(record, slots, unchecked, tokens - device_tokens)
        return tokens - device_tokens

    def _if_checked(
        self, record: RequestRecord, slots: Sequence[SlotId], unchecked: Sequence[SlotId], tokens: int
    ) -> int | None:
        """Promise tokens when the slots that are now pinned for them were checked; else have that done."""
        state = self._state
        # Also by a check for the hit that this one replaces.
        state.checked.passed(set(slots).difference(unchecked))
        if not unchecked:
            return tokens
        self._checks.begin(record, unchecked)
        state.outbox.put(LookupDeferred(record.request, record.request))
        return None

    def drop(self, request: RequestId, cause: PinDropCause) -> PendingHit | None:
        """Let go of what a request's last lookup pinned, if anything; return that lookup's answer."""
        state = self._state
        hit = state.hits.take(request)
        if hit is not None and hit.pins is not None:
            hit.pins.close()
            record = state.requests.live(request)
            assert record is not None, request  # whoever goes drops its hit first
            state.holds.head_was_used(record, hit.device_tokens)
            state.outbox.put(HitDropped(request, hit.blocks, cause))
        return hit

    def settle(self, record: RequestRecord, hit: PendingHit) -> None:
        """An admission counts its last lookup, in block positions behind what the device held."""
        alignment = self._state.shape.alignment
        end = max(record.prompt_tokens, hit.tokens)
        found = -(-(hit.tokens - hit.device_tokens) // alignment)
        missed = -(-(end - hit.tokens) // alignment)
        tokens, lacking = hit.tokens - hit.device_tokens, end - hit.tokens
        cause = hit.cause if missed else None
        event = LookupSettled(record.request, hit.device_tokens, found, missed, tokens, lacking, cause)
        self._state.outbox.put(event)

    def reset(self) -> None:
        """What lookups found until now is not to be found."""
        for request in self._state.hits.all():
            self.drop(request, PinDropCause.RESET)

    def _search(self, record: RequestRecord, device_tokens: int) -> _Answer:
        """Return a lookup's answer, not yet pinned."""
        state = self._state
        barred = _barred(record, state)
        if barred is not None:
            return _Answer(device_tokens, (), barred)
        limit = record.prompt_tokens - 1
        match = longest_match(state.shape, record.keys, state.pool.index, device_tokens, limit)
        if 0 < match.tokens - device_tokens < record.least_tokens:
            return _Answer(device_tokens, (), MissCause.LOAD_DECLINED)
        return _Answer(match.tokens, match.slots, self._cause(record, match.tokens, match.missing))

    def _cause(self, record: RequestRecord, length: int, missing: BlockKey | None) -> MissCause | None:
        """Return why the block position behind a length missed, None where no position is left."""
        state, alignment = self._state, self._state.shape.alignment
        if length >= record.prompt_tokens:
            return None
        if length + alignment > record.prompt_tokens:
            return MissCause.PARTIAL_BLOCK
        if missing is None:
            at_limit = length + alignment == record.prompt_tokens
            return MissCause.LAST_TOKEN if at_limit else MissCause.READ_AHEAD
        if missing in state.stores.keys:
            return MissCause.STORING
        return state.misses.cause(missing)


def _barred(record: RequestRecord, state: CoreState) -> MissCause | None:
    """Return why a request may not use the host at all, None where it may."""
    if not record.reads_cache:
        return MissCause.OPTED_OUT
    if record.load_failed:
        return MissCause.LOAD_FAILED
    if state.degraded:
        return MissCause.DEGRADED
    return MissCause.STALLED if state.stall.is_on else None
