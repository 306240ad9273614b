"""What is known of the disk: its slots, the checksums of what they hold, and what the index must record.

A slot of the disk stands for the same slot in every rank's file.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvoffload.core.job import Job
from kvoffload.core.tier_state import TierState
from kvoffload.model.disk import DiskRecord, Put, Strike, Use
from kvoffload.model.ids import SlotId
from kvoffload.model.transfer import Tier


class DiskState(TierState):
    """The disk. `is_open` once all of the index was read, `is_closed` when it cannot be read or written any more.

    Slots that have no space on disk are in the pool too, and never handed out.

    Args:
        after_hits: as of `TierState`.
        ranks: how many write each block.

    Attributes:
        capacity: slots that have space, as far as the index was read.
        has_block: by slot, 1 where it has a block that can hit.
        sums: by rank and slot, the checksum of the rank's shard of that block; 0 where there is none. A dict would now and then
            copy itself inside a hook; a tuple a slot would take several times as much, and be the collector of garbage's to visit.
        records: what the index must record, in order.
    """

    def __init__(self, after_hits: int, ranks: int) -> None:
        super().__init__(Tier.DISK, after_hits)
        self.capacity = 0
        self.has_block = bytearray()
        self.sums = [array("Q") for _ in range(ranks)]
        self.records: list[DiskRecord] = []

    def restore(self, slots: int, puts: Sequence[Put], free: Sequence[SlotId]) -> None:
        """Take over a part of the index of an earlier process."""
        known = self.pool.index.parts
        new = [put for put in puts if put.key not in known[put.key[0]]]
        blocks = {put.slot: put.key for put in new}
        twice = () if len(new) == len(puts) else [put.slot for put in puts if put.slot not in blocks]
        self.pool.adopt(slots, blocks, (*free, *twice))
        more = slots - len(self.has_block)
        self.has_block.extend(bytes(more))
        for of_rank in self.sums:
            of_rank.frombytes(bytes(8 * more))
        self.capacity += len(puts) + len(free)
        self._has(new)

    def expected(self, places: Sequence[SlotId]) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*[[of_rank[place] for place in places] for of_rank in self.sums], strict=True))

    def put(self, job: Job) -> None:
        sums = zip(*[job.sums[rank] for rank in sorted(job.sums)], strict=True)
        puts = list(map(Put, job.places, job.keys, sums))
        self._has(puts)
        self.records += reversed(puts)  # so that the next process, too, evicts a prefix's head last

    def read(self, places: Sequence[SlotId]) -> None:
        # A late report of an earlier fetch may have named a place corrupt, which removed its block from the index.
        self.records += [Use(place) for place in places if self.has_block[place]]

    def strike(self, place: SlotId) -> None:
        if self.has_block[place]:
            self.has_block[place] = 0
            for of_rank in self.sums:
                of_rank[place] = 0
            self.records.append(Strike(place))

    def forget_all(self) -> int:
        """Forget all blocks; return how many. The index is removed, so nothing is recorded."""
        slots = len(self.has_block)
        self.has_block = bytearray(slots)
        self.sums = [array("Q", bytes(8 * slots)) for _ in self.sums]
        self.records.clear()
        return super().forget_all()

    def _has(self, puts: Sequence[Put]) -> None:
        """Note the checksums of blocks in slots that had none."""
        has_block = self.has_block
        for put in puts:
            has_block[put.slot] = 1
        for rank, of_rank in enumerate(self.sums):
            for put in puts:  # `zip(*...)` would make an object a block that the collector counts
                of_rank[put.slot] = put.sums[rank]
