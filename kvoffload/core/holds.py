"""Holds: slots that a request stored or hit stay out of the eviction order while it counts on them (R8, R15).

They are let go together and deepest first, when the request has lost its block table or ended, and its last store has
arrived. Let go one store at a time, a prefix's head would be evicted before its tail, which is of no use alone. For
the same reason blocks that the request used and another put on the host, which are not held, count as used at that moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from kvoffload.core.host_pool import HostPool
from kvoffload.core.requests import RequestRecord
from kvoffload.core.states import RequestState
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import BlockKey, SlotId

_FINISHING = RequestState.FINISHING  # to reach an enum's member by its class takes ten times as long


class Holds:
    """The only one that holds slots, and the only writer of `RequestRecord.held`."""

    def __init__(self, pool: HostPool, groups: tuple[GroupSpec, ...]) -> None:
        self._pool = pool
        self._block_tokens = [group.block_tokens for group in groups]

    def add(self, record: RequestRecord, slots: Sequence[SlotId]) -> None:
        """A request counts on slots, deeper than those before them. One that has ended may not count on them any more."""
        state = record.state
        if state < _FINISHING or (state is _FINISHING and not record.is_stuck):
            self._pool.hold(slots)
            record.held += slots

    def let_go(self, record: RequestRecord) -> None:
        """A request counts on no slot any longer; its deepest become evictable first."""
        if record.shares or record.found_tokens:
            self._use_all(record)
            record.shares = False
        else:
            self._pool.unhold(reversed(record.held))
        record.held.clear()

    def head_was_used(self, record: RequestRecord, tokens: int) -> None:
        """What lies behind these tokens of a request was let go of: what lies before them is to be evicted after it."""
        for key in self._deepest_first(record, tokens):
            if (slot := self._pool.index.get(key)) is not None:
                self._pool.touch(slot)

    def _use_all(self, record: RequestRecord) -> None:
        """Let go of what is held, and touch what is not, in one order: a shared head is used as late as an own tail."""
        parts = self._pool.index.parts
        keys = self._deepest_first(record, record.confirmed_tokens)
        used = [slot for key in keys if (slot := parts[key[0]].get(key)) is not None]
        held, reached = Counter(record.held), set(used)
        for slot in reversed(held):
            if slot not in reached:  # worthless, or deeper than this incarnation has come
                self._let_go_of(slot, held[slot])
        for slot in used:
            if slot in held:
                self._let_go_of(slot, held[slot])
            else:
                self._pool.touch(slot)

    def _let_go_of(self, slot: SlotId, times: int) -> None:
        self._pool.unhold([slot] * times)

    def _deepest_first(self, record: RequestRecord, tokens: int) -> Iterable[BlockKey]:
        """Return the keys of the whole blocks of a request's first tokens."""
        used = [
            (place * size, key)
            for keys, size in zip(record.keys, self._block_tokens, strict=True)
            for place, key in enumerate(islice(keys, tokens // size))
        ]
        if len(self._block_tokens) > 1:
            used.sort(key=_depth)
        return [key for _, key in reversed(used)]

    def stuck(self, record: RequestRecord) -> None:
        """A copy of a request's was given up: once the request has ended, nothing waits for it."""
        record.is_stuck = True
        self.let_go_if_over(record)

    def let_go_if_over(self, record: RequestRecord) -> None:
        """Let go when the request has no block table, or has ended, and no store of its is on its way."""
        is_waiting = record.jobs and not record.is_stuck
        if not (is_waiting or record.has_table):
            self.let_go(record)


def _depth(place: tuple[int, BlockKey]) -> int:
    return place[0]
