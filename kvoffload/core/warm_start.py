"""Warm start: after a restart, the most recently used blocks on the disk are fetched before a request asks for them.

They fill free slots alone, a quarter of the host at most, a few at a time, and only while nothing else is loaded or fetched.
The least recently used of them come first: both pools then keep the order in which these blocks were used. What a request looks
for is left to it: a deeper block that came after the prefix's head would be evicted after it (R15).
"""

from __future__ import annotations

from collections import deque

from kvoffload.core.disk_state import DiskState
from kvoffload.core.fetches import Fetches
from kvoffload.core.machine import SlotState
from kvoffload.core.request import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.model.disk import Put
from kvoffload.model.ids import BlockKey

_MOST = 2**16
"""Most blocks that are remembered for it."""


class WarmStart:
    """Plans fetches that no request asks for."""

    def __init__(self, state: CoreState, disk: DiskState, fetches: Fetches) -> None:
        self._state = state
        self._disk = disk
        self._fetches = fetches
        self.keys: deque[BlockKey] = deque(maxlen=_MOST)
        """What is left to be fetched, the most recently used last."""
        self._is_trimmed = False
        self._left: set[BlockKey] = set()

    @property
    def is_due(self) -> bool:
        """Whether steps are needed for it."""
        state = self._state
        return bool(self.keys) and self._disk.is_usable and state.degraded is None and not state.stall.is_on

    def restored(self, puts: tuple[Put, ...]) -> None:
        """The disk has these blocks, the most recently used last, and behind all before."""
        self.keys.extend([put.key for put in puts])

    def leave_to(self, record: RequestRecord) -> None:
        """Fetch nothing of an arriving request's prefix: it fetches what it can use."""
        self._left.update(*record.keys)

    def stop(self) -> None:
        """Fetch nothing more."""
        self.keys.clear()
        self._left.clear()

    def step(self) -> None:
        """Plan what may be fetched now."""
        state, disk = self._state, self._disk
        if not self.is_due or state.growing or disk.fetching or state.jobs.is_loading:
            return
        if not self._is_trimmed:
            self._is_trimmed = True
            while len(self.keys) > self._fetches.budget:
                self.keys.popleft()
        free = state.pool.count(SlotState.EMPTY)
        if not free:
            self.stop()
            return
        keys: list[BlockKey] = []
        most = min(free, disk.bound.slots(state.pool.capacity))
        while self.keys and len(keys) < most:
            key = self.keys.popleft()
            if key in disk.pool.index and not self._is_elsewhere(key):
                keys.append(key)
        if keys:
            keys.reverse()
            self._fetches.plan(disk, keys, [disk.pool.index[key] for key in keys])

    def _is_elsewhere(self, key: BlockKey) -> bool:
        """Return whether the host has a block, or gets it in another way."""
        state = self._state
        return key in state.pool.index or key in state.in_flight.keys or key in self._left
