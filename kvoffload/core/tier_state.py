"""What is known of a tier below the host: a pool of its slots, the keys under way, and what was used again.

The pool is of the host's own kind, with the same table of states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvoffload.core.copy_bound import CopyBound
from kvoffload.core.eviction import LruOrder
from kvoffload.core.host_pool import HostPool
from kvoffload.core.job import Job
from kvoffload.core.machine import SlotState
from kvoffload.model.ids import BlockKey, Rank, SlotId
from kvoffload.model.transfer import Tier


class TierState:
    """Written by `Spills`, `Fetches` and the facts about the tier.

    Args:
        tier: which it is.
        after_hits: a block is written to the tier when it was found again this often.

    Attributes:
        takes_all: blocks are written to it although they were never found again.
        pool: the tier's slots.
        is_open: what the tier holds is known.
        is_closed: the tier cannot be used any more, or not for now.
        failing: ranks whose calls fail or hang.
        abandoned: jobs on the tier that some rank never reported.
        bound: on the blocks of open spills and of a warm start.
        least_tokens: additions to a hit that are shorter are computed instead.
        spilling: keys that a job is bringing to the tier.
        fetching: keys that a job is bringing from it.
        candidates: keys that were used again and may be worth a spill, in the order in which the host evicts them; `waiting`
            has the same.
        namespace: of the blocks in a store that engines share.
    """

    namespace = ""

    def __init__(self, tier: Tier, after_hits: int) -> None:
        self.tier = tier
        self.takes_all = not after_hits
        self._after_hits = after_hits
        self._hits: dict[BlockKey, int] = {}
        self.pool = HostPool(LruOrder())
        self.is_open = self.is_closed = False
        self.failing: set[Rank] = set()
        self.abandoned = self.least_tokens = 0
        self.bound = CopyBound()
        self.spilling: dict[BlockKey, Job] = {}
        self.fetching: dict[BlockKey, Job] = {}
        self.candidates: deque[BlockKey] = deque()
        self.waiting: set[BlockKey] = set()

    @property
    def is_usable(self) -> bool:
        """Whether a copy may be begun."""
        return self.is_open and not self.is_closed and not self.failing and not self.abandoned

    @property
    def has_blocks(self) -> bool:
        """Whether any block can be found."""
        return bool(self.pool.count(SlotState.READY) or self.pool.count(SlotState.PINNED))

    def reuse(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks were found again, a prefix's head last."""
        on_tier = self.pool.index.parts
        for key in keys:
            if key in on_tier[key[0]] or key in self.waiting or key in self.spilling:
                continue
            hits = self._hits.pop(key, 0) + 1
            if hits < self._after_hits:
                self._hits[key] = hits
            else:
                self.waiting.add(key)
                self.candidates.append(key)

    def evicted(self, keys: Sequence[BlockKey]) -> int:
        """Note that these blocks have left the host; return how many of them waited for a spill."""
        if self._hits:
            for key in keys:
                self._hits.pop(key, None)
        return len(self.waiting.intersection(keys)) if self.waiting else 0

    def expected(self, places: Sequence[SlotId]) -> tuple[tuple[int, ...], ...]:
        """Return the checksums of the blocks in these slots; nothing if values contain theirs."""
        return ()

    def put(self, job: Job) -> None:
        """Note that every rank has written a job's blocks."""

    def read(self, places: Sequence[SlotId]) -> None:
        """Note that every rank has read these slots for a request."""

    def strike(self, place: SlotId) -> None:
        """Note that a slot's block is not to be found any more."""

    def forget_all(self) -> int:
        """Forget all blocks; return how many of them left the tier."""
        self.candidates.clear()
        self.waiting.clear()
        self._hits.clear()
        return len(self.pool.forget_all())
