"""Loads of prefixes that are longer than the host: a part is loaded, leaves the host, and makes room for the next part.

    lookup ─▶ head on the host, rest on lower tiers ─▶ allocated ─▶ load of the head ─▶ fetch ─▶ load ─▶ fetch ─▶ ...

The engine allocates blocks for the whole prefix, and hears of the load's end after the last part, or of its failure as
soon as one part has failed. It then computes all tokens of the hit, so engines that do not recompute failed loads get
only the head. A part never waits for room: it gets the slots that the parts before it have left, or the load fails.

`Loads` plans the copies of a part from the host to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvoffload.core.jobs import Fetch
from kvoffload.core.lower_tiers import LowerTiers, have
from kvoffload.core.machine import SlotState
from kvoffload.core.match import Match, longest_match
from kvoffload.core.request import PendingHit, RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.tiers import LayeredIndex
from kvoffload.model.ids import BlockKey, SlotId


class Parts:
    """Finds the rest of a long prefix on lower tiers, and fetches it in parts."""

    def __init__(self, state: CoreState, lower_tiers: LowerTiers) -> None:
        self._state = state
        self._lower_tiers = lower_tiers

    def find(self, record: RequestRecord, hit: PendingHit) -> Match | None:
        """Return the whole prefix of which `hit` is the head on the host, or None if the rest must be computed.

        The rest counts only if the host has too few slots for the prefix. It is marked as used on its tiers.
        """
        state, missing = self._state, hit.missing
        if missing is None or not (record.asks_tiers and self._lower_tiers.loads_in_parts):
            return None
        tiers = self._lower_tiers.usable(record)
        if not have(tiers, missing):
            return None
        index = LayeredIndex(state.pool.index, tiers)
        limit = record.longest_hit(hit.device_tokens, state.shape)
        found = longest_match(state.shape, record.keys, index, hit.tokens, limit)
        rest = index.on_tiers(found.slots)
        least = max([tier.least_tokens for _, tier, _ in rest])
        is_short = found.tokens - hit.tokens < least
        if is_short or found.tokens - hit.device_tokens <= state.pool.capacity * state.shape.alignment:
            return None
        for tier in tiers:
            tier.pool.use([slot for _, one, slot in reversed(rest) if one is tier])
        record.fetched_from |= {key: tier.tier for key, tier, _ in rest}
        return found

    def next(self, record: RequestRecord) -> Sequence[SlotId] | None:
        """Return the host slots of a load's next part, heads first; none while a fetch brings the part.

        None if the part cannot be had, so that the load must fail.
        """
        state, rest = self._state, record.rest
        assert rest is not None, record
        may_go_on = record.asks_tiers and rest.epoch == state.epoch  # R10
        if state.stall.is_on or not may_go_on:
            return None
        index = state.pool.index
        keys = rest.keys[: self._most]
        if slots := [index[key] for key in takewhile(index.__contains__, keys)]:
            return slots
        job = state.in_flight.keys.get(keys[0]) or self._fetch(record, keys)
        if not isinstance(job, Fetch):
            return None
        job.wanted[record] = None
        rest.job = job.id
        return ()

    def _fetch(self, record: RequestRecord, keys: Sequence[BlockKey]) -> Fetch | None:
        """Plan a fetch of the first of these keys that one tier has and that are not in flight; None without room."""
        state = self._state
        tier = next((one for one in self._lower_tiers.usable(record) if have((one,), keys[0])), None)
        if tier is None:
            return None
        here, on_way = state.pool.index, state.in_flight.keys
        wanted = list(
            takewhile(lambda key: have((tier,), key) and key not in here and key not in on_way, keys)
        )
        wanted = wanted[: state.pool.room]
        if not wanted:
            return None
        slots = [tier.pool.index[key] for key in wanted]
        tokens = len(wanted) * state.shape.alignment
        return self._lower_tiers.store.fetches[tier].plan(wanted, slots, record.request, tokens)

    def make_room(self, record: RequestRecord, slots: Sequence[SlotId]) -> None:
        """Free the deepest of the slots that were loaded last, as many as the next part needs.

        Slots that a request needs, and blocks that no lower tier has, stay.
        """
        state, pool, rest = self._state, self._state.pool, record.rest
        lacking = min(self._most, len(rest.keys) if rest else 0) - pool.count(SlotState.EMPTY)
        freed: list[BlockKey] = []
        for slot in reversed(slots):
            key = pool.key(slot)
            is_free = pool.state(slot) is SlotState.READY and slot not in pool.holds
            if len(freed) < lacking and is_free and key is not None and have(state.tiers, key):
                pool.invalidate(slot)
                freed.append(key)
        if freed:
            state.evicted(freed)
            self._lower_tiers.evicted(freed)

    @property
    def _most(self) -> int:
        """Return how many blocks a part may have: an eighth of the host."""
        return max(self._state.pool.capacity // 8, 1)
