"""What is known of the disk: a pool of its slots, the checksums of what they hold, and what the index must record.

The pool is the host's own kind, with the same table of states. A slot of the disk stands for the same slot in every rank's file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvoffload.core.eviction import LruOrder
from kvoffload.core.host_pool import HostPool
from kvoffload.core.job import Job
from kvoffload.core.key_index import KeyIndex
from kvoffload.model.disk import DiskRecord, Put, Strike
from kvoffload.model.ids import BlockKey, Rank, SlotId


class DiskState:
    """`Spills` and `Fetches` write it, and who restores it.

    Args:
        after_hits: a block is written to the disk when it was found again so often.

    Attributes:
        pool: the disk's slots.
        sums: the checksums of the block in each slot that can hit, one a rank.
        is_open: the index was read as a whole.
        is_closed: the index cannot be read or written any more.
        failing: ranks whose disk fails or hangs.
        abandoned: jobs on the disk that some rank never reported.
        spilling: keys that a job is bringing to the disk.
        fetching: keys that a job is bringing from it.
        candidates: keys that were used again and may be worth a spill, the first used first; `waiting` has the same.
        records: what the index must record, in order.
    """

    def __init__(self, after_hits: int) -> None:
        self._after_hits = after_hits
        self._hits: dict[BlockKey, int] = {}
        self.pool = HostPool(LruOrder())
        self.sums: dict[SlotId, tuple[int, ...]] = {}
        self.is_open = self.is_closed = False
        self.failing: set[Rank] = set()
        self.abandoned = 0
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
        self.sums.update({put.slot: put.sums for put in puts if put.slot in blocks})

    def reuse(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks were found again, a prefix's head first."""
        for key in keys:
            if key in self.waiting or key in self.pool.index or key in self.spilling:
                continue
            hits = self._hits.pop(key, 0) + 1
            if hits < self._after_hits:
                self._hits[key] = hits
            else:
                self.waiting.add(key)
                self.candidates.append(key)

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks have come to the host."""
        if not self._after_hits:
            self.reuse(keys)

    def evicted(self, keys: Sequence[BlockKey]) -> int:
        """Note that these blocks have left the host; return how many of them waited for a spill."""
        for key in keys:
            self._hits.pop(key, None)
        return len(self.waiting.intersection(keys))

    def next_candidate(self) -> BlockKey | None:
        """Return the key that has waited longest, and forget it; None without one."""
        if not self.candidates:
            return None
        key = self.candidates.popleft()
        self.waiting.discard(key)
        return key

    def strike(self, slot: SlotId) -> None:
        """What a slot holds is not to be found any more."""
        if self.sums.pop(slot, None) is not None:
            self.records.append(Strike(slot))

    def forget_all(self) -> int:
        """Nothing is to be found any more; return how many blocks were. The index begins anew, so nothing is recorded."""
        self.sums.clear()
        self.records.clear()
        self.candidates.clear()
        self.waiting.clear()
        self._hits.clear()
        return len(self.pool.forget_all())


class HostAndDisk:
    """The slots that hold a key: those of the host as they are, those of the disk as negative numbers."""

    def __init__(self, host: KeyIndex, disk: KeyIndex) -> None:
        self.parts = _Parts(host, disk)


class _Parts(Sequence["_Part"]):
    def __init__(self, host: KeyIndex, disk: KeyIndex) -> None:
        self._host, self._disk = host, disk

    def __len__(self) -> int:
        return len(self._host.parts)

    def __getitem__(self, byte: int) -> _Part:  # type: ignore[override]  # nobody slices it
        return _Part(self._host.parts[byte], self._disk.parts[byte])


class _Part:
    __slots__ = ("_disk", "_host")

    def __init__(self, host: dict[BlockKey, SlotId], disk: dict[BlockKey, SlotId]) -> None:
        self._host, self._disk = host, disk

    def get(self, key: BlockKey, /) -> SlotId | None:
        slot = self._host.get(key)
        if slot is not None:
            return slot
        place = self._disk.get(key)
        return None if place is None else as_negative(place)


def as_negative(place: SlotId) -> SlotId:
    """Return the negative number that stands for a slot of the disk, or that slot for such a number."""
    return SlotId(-1 - place)
