"""Holds: slots that a request stored or hit stay out of the eviction order while it counts on them (R8, R15).

They are let go together and deepest first, when the request has lost its block table, or has ended and its last store
has arrived. Let go one store at a time, a prefix's head would be evicted before its tail, which is of no use alone.
"""

from __future__ import annotations

from kvoffload.core.host_pool import HostPool
from kvoffload.core.requests import RequestRecord
from kvoffload.core.states import RequestState
from kvoffload.model.ids import SlotId


class Holds:
    """The only one that holds slots, and the only writer of `RequestRecord.held`."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool

    def add(self, record: RequestRecord, slot: SlotId) -> None:
        """A request counts on a slot, deeper than those before it. One that has ended may not count on it any more."""
        state = record.state
        if state < RequestState.FINISHING or (state is RequestState.FINISHING and not record.is_stuck):
            self._pool.hold(slot)
            record.held.append(slot)

    def let_go(self, record: RequestRecord) -> None:
        """A request counts on no slot any longer; its deepest become evictable first."""
        for slot in reversed(record.held):
            self._pool.unhold(slot)
        record.held.clear()

    def stuck(self, record: RequestRecord) -> None:
        """A copy of a request's was given up: once the request has ended, nothing waits for it."""
        record.is_stuck = True
        self.let_go_if_over(record)

    def let_go_if_over(self, record: RequestRecord) -> None:
        """Let go when the request has ended and no store of its is on its way."""
        if record.state is RequestState.GONE or (record.state is RequestState.FINISHING and record.is_stuck):
            self.let_go(record)
