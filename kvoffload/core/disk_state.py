"""What is known of the disk: a pool of its slots, the checksums of what they hold, and what the index must record.

The pool is the host's own kind, with the same table of states. A slot of the disk stands for the same slot in every rank's file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvoffload.core.copy_bound import CopyBound
from kvoffload.core.eviction import LruOrder
from kvoffload.core.host_pool import HostPool
from kvoffload.core.job import Job
from kvoffload.model.disk import DiskRecord, Put, Strike, Use
from kvoffload.model.ids import BlockKey, Rank, SlotId
from kvoffload.model.transfer import Tier


class DiskState:
    """`Spills` and `Fetches` write it, and the facts that restore it.

    Args:
        after_hits: a block is written to the tier when it was found again so often.
        tier: which it is.

    Attributes:
        pool: the disk's slots, also those that have no space on disk and so are never handed out.
        capacity: slots that have space, as far as the index was read.
        sums: the checksums of the block in each slot that can hit, one a rank.
        is_open: all of the index was read.
        is_closed: the index cannot be read or written any more.
        failing: ranks whose disk fails or hangs.
        abandoned: jobs on the disk that some rank never reported.
        bound: on blocks that spills and a warm start have under way.
        least_tokens: what the disk adds to a hit is computed where it is shorter.
        spilling: keys that a job is bringing to the disk.
        fetching: keys that a job is bringing from it.
        candidates: keys that were used again and may be worth a spill, in the order in which the host evicts them; `waiting`
            has the same.
        records: what the index must record, in order.
        namespace: under which blocks are in a remote store.
    """

    namespace = ""

    def __init__(self, after_hits: int, tier: Tier = Tier.DISK) -> None:
        self.tier = tier
        self._after_hits = after_hits
        self._hits: dict[BlockKey, int] = {}
        self.pool = HostPool(LruOrder())
        self.sums: dict[SlotId, tuple[int, ...]] = {}
        self.capacity = 0
        self.is_open = self.is_closed = False
        self.failing: set[Rank] = set()
        self.abandoned = self.least_tokens = 0
        self.bound = CopyBound()
        self.spilling: dict[BlockKey, Job] = {}
        self.fetching: dict[BlockKey, Job] = {}
        self.candidates: deque[BlockKey] = deque()
        self.waiting: set[BlockKey] = set()
        self.records: list[DiskRecord] = []

    @property
    def is_usable(self) -> bool:
        """Whether a copy may be begun."""
        return self.is_open and not self.is_closed and not self.failing and not self.abandoned

    def restore(self, slots: int, puts: Sequence[Put], free: Sequence[SlotId]) -> None:
        """Take over a part of the index of an earlier process."""
        known = self.pool.index
        blocks = {put.slot: put.key for put in puts if put.key not in known}
        twice = [put.slot for put in puts if put.slot not in blocks]
        self.pool.adopt(slots, blocks, (*free, *twice))
        self.capacity += len(puts) + len(free)
        self.sums.update({put.slot: put.sums for put in puts if put.slot in blocks})

    def reuse(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks were found again, a prefix's head last."""
        on_disk = self.pool.index.parts
        for key in keys:
            if key in self.waiting or key in on_disk[key[0]] or key in self.spilling:
                continue
            hits = self._hits.pop(key, 0) + 1
            if hits < self._after_hits:
                self._hits[key] = hits
            else:
                self.waiting.add(key)
                self.candidates.append(key)

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks have come to the host, a prefix's head first."""
        if not self._after_hits:
            self.reuse(keys[::-1])

    def evicted(self, keys: Sequence[BlockKey]) -> int:
        """Note that these blocks have left the host; return how many of them waited for a spill."""
        for key in keys:
            self._hits.pop(key, None)
        return len(self.waiting.intersection(keys))

    @property
    def has_blocks(self) -> bool:
        """Whether any block can be found."""
        return bool(self.sums)

    def expected(self, places: Sequence[SlotId]) -> tuple[tuple[int, ...], ...]:
        """Return the checksums of what these slots must hold."""
        return tuple([self.sums[place] for place in places])

    def put(self, job: Job) -> None:
        """Note that every rank has written a job's blocks."""
        sums = zip(*[job.sums[rank] for rank in sorted(job.sums)], strict=True)
        puts = list(map(Put, job.places, job.keys, sums))
        self.sums.update({put.slot: put.sums for put in puts})
        self.records += reversed(puts)  # so that the next process, too, evicts a prefix's head last

    def read(self, places: Sequence[SlotId]) -> None:
        """Note that every rank has read these slots for a request."""
        self.records += [Use(place) for place in places]

    def strike(self, slot: SlotId) -> None:
        """What a slot holds is not to be found any more."""
        if self.sums.pop(slot, None) is not None:
            self.records.append(Strike(slot))

    def forget_all(self) -> int:
        """Nothing is to be found any more; return how many blocks were. The index is removed, so nothing is recorded."""
        self.sums.clear()
        self.records.clear()
        self.candidates.clear()
        self.waiting.clear()
        self._hits.clear()
        return len(self.pool.forget_all())
