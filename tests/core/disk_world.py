"""A small simulated engine with a disk tier. It tracks the bytes of every slot, and the index on the disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

from msgspec import structs

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import Policy
from kvoffload.core.tiers import DiskTier
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import Direction, DiskJob, Invalidate, JobReport, Put, Tier
from tests.core.below import disk_of
from tests.core.lower_world import LowerWorld
from tests.core.world import CORRUPT, DONE, FAILED, GARBAGE, holds, keys_of

Places = tuple[int, ...]


class DiskWorld(LowerWorld):
    """A world with a disk.

    With `before`, this is the next engine on that world's disk. It continues the count of resets, so that blocks
    computed before a reset can be recognized.
    """

    TIER = Tier.DISK

    def __init__(
        self,
        *groups: GroupSpec,
        disk: int = 32,  # slots
        before: DiskWorld | None = None,
        opens: bool = True,  # whether the disk's index is read at once
        **settings: Any,  # noqa: ANN401  # the world's own
    ) -> None:
        self.places: list[dict[SlotId, BlockKey]]
        self.places = before.places if before is not None else [{} for _ in range(settings.get("ranks", 1))]
        self.index: OrderedDict[SlotId, Put] = OrderedDict(before.index if before is not None else ())
        self.synced = self.index.copy()
        self.disk_size = disk
        self.place_age: dict[SlotId, int] = dict(before.place_age if before is not None else ())
        self.disk_rotten: set[tuple[int, SlotId]] = set(before.disk_rotten if before is not None else ())
        super().__init__(*groups, **settings)
        if before is not None:
            self.resets = before.resets
        self.unread = [*self._parts(3)]
        if opens:
            self.open()

    def _make_core(self, policy: Policy) -> OffloadCore:
        return super()._make_core(replace(policy, tiers=((DiskTier, self.min_hits), *policy.tiers)))

    @property
    def disk(self) -> DiskTier:
        return disk_of(self.core.state)

    def open(self) -> None:
        """Read the rest of the index, a few entries at a time."""
        while self.unread:
            self.tell(self.unread.pop(0))

    def _parts(self, size: int) -> Iterator[facts.TierRestored]:
        """Yield the index in parts. On a smaller disk, only the most recently used entries keep their slots."""
        puts = list(self.index.values())[-self.disk_size :]
        self.index = OrderedDict((put.slot, put) for put in puts)
        slots = max(self.disk_size, max(self.index, default=-1) + 1)
        free = [SlotId(slot) for slot in range(slots) if slot not in self.index][: self.disk_size - len(puts)]
        for start in range(0, max(len(puts), 1), size):
            yield facts.TierRestored(Tier.DISK, slots, tuple(puts[start : start + size]))
        yield facts.TierRestored(Tier.DISK, slots, free=tuple(free), is_last=True)

    def die(self, *, loses_tail: bool = False) -> None:
        """Kill the engine while it writes. With `loses_tail`, a power failure also loses unsynced entries."""
        super().die()
        for copy in self.copies.values():
            if copy.job.tier is Tier.DISK and copy.job.direction is Direction.STORE:
                for place in copy.job.targets:
                    for rank in copy.running:
                        self.places[rank][place] = GARBAGE
                    self.place_age[place] = self.resets
        if loses_tail:
            self.index = self.synced
        self.disk_rotten = {
            (rank, place)
            for rank, held in enumerate(self.places)
            for place, put in self.index.items()
            if held.get(place) != put.key
        }

    # -- ranks --------------------------------------------------------------------------------------------------

    def _disk_store(
        self, rank: int, job: DiskJob, outcome: CopyOutcome, corrupt: Places, stuck: Places = ()
    ) -> JobReport:
        sums = []
        bad = [at for at, slot in enumerate(job.slots) if (rank, slot) in self.rotten or at in corrupt]
        if bad and outcome is not FAILED:
            return JobReport(job.id, job.direction, CORRUPT, 0, 0.0, 0.0, corrupt=tuple(bad))
        for slot, place in zip(job.slots, job.targets, strict=True):
            # A reset during the spill may have emptied the slot. The core then ignores the spill's result.
            held = GARBAGE if outcome is FAILED else self.host[rank].get(slot, GARBAGE)
            self.places[rank][place] = held
            self.place_age[place] = self.host_age.get(slot, 0)
            self.disk_rotten.discard((rank, place))
            sums.append(checksum(rank, held))
        done = tuple(sums) if outcome is DONE else ()
        return JobReport(job.id, job.direction, outcome, 0, 0.0, 0.0, sums=done, stuck=stuck)

    def _disk_load(
        self, rank: int, job: DiskJob, outcome: CopyOutcome, corrupt: Places, stuck: Places = ()
    ) -> JobReport:
        wrong = list(corrupt)
        for at, (slot, place) in enumerate(zip(job.slots, job.targets, strict=True)):
            held = self.places[rank].get(place, GARBAGE)
            is_right = checksum(rank, held) == job.extra[at][rank] and at not in corrupt
            if not is_right and at not in wrong:
                wrong.append(at)
            self.host[rank][slot] = held if is_right and outcome is not FAILED else GARBAGE
            self.host_age[slot] = self.place_age.get(place, 0)
            self.rotten.discard((rank, slot))
        if outcome is not FAILED:
            outcome = CORRUPT if wrong else DONE
        found = tuple(sorted(wrong)) if outcome is CORRUPT else ()
        return JobReport(job.id, job.direction, outcome, 0, 0.0, 0.0, found, stuck=stuck)

    def spoil(self, rank: int, text: str) -> None:
        """Corrupt the last block of a text on the disk, so that only the checksum can detect the damage."""
        self.spoil_place(rank, self.disk.pool.index[keys_of(text, self.groups[0])[-1]])

    def spoil_place(self, rank: int, place: SlotId) -> None:
        self.places[rank][place] = GARBAGE
        self.disk_rotten.add((rank, place))

    # -- what must hold -----------------------------------------------------------------------------------------

    def check(self) -> None:
        self._write_index()
        super().check()
        pool = self.disk.pool
        if not self.disk.is_open:
            return
        written = {put.key: slot for slot, put in self.index.items()}
        assert written == dict(pool.index), "index and pool differ"
        for key, place in pool.index.items():
            assert self.place_age[place] == self.resets, f"place {place} can hit, but is older than the reset"
            for rank, held in enumerate(self.places):
                is_right = holds(held.get(place), key, self.shape) or (rank, place) in self.disk_rotten
                assert is_right, f"place {place} can hit, but holds {held.get(place)!r}"

    def _write_index(self) -> None:
        records = self.disk.take_for_catalog()
        if records:
            self.synced = self.index.copy()
        for record in records:
            if isinstance(record, Put):
                assert record.slot not in self.index, "a slot was put before it was invalidated"
                self.index[record.slot] = record
            elif isinstance(record, Invalidate):
                del self.index[record.slot]
            else:
                self.index[record.slot] = self.index.pop(record.slot)

    def reset(self) -> None:
        self.index.clear()
        self.synced.clear()
        self.unread = [
            structs.replace(part, puts=(), free=(*part.free, *[put.slot for put in part.puts]))
            for part in self.unread
        ]
        super().reset()


def checksum(rank: int, held: BlockKey) -> int:
    return crc32(held, rank)
