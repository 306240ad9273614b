"""The tiers below the host: what is known of each, and the index in which a search finds blocks of all of them.

A tier's slots are in a pool of the host's own kind, with the same table of states. A slot of the disk stands for the same slot in
every rank's file. A remote store has an index of its own, and other engines write to it and evict from it: there a slot is only a
hint that the store has a block, and the pool's size bounds the hints. A fetch that finds nothing removes the hint.

`tier_copies` decides what is copied.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from kvoffload.core.jobs import InFlight, Jobs, Spill
from kvoffload.core.key_index import KeyIndex
from kvoffload.core.machine import JobState, SlotState
from kvoffload.core.slots import HostPool
from kvoffload.model.engine import BlockPool
from kvoffload.model.ids import BlockKey, JobId, Rank, RequestId, SlotId
from kvoffload.model.limit import AdaptiveLimit
from kvoffload.model.wire import Direction, DiskRecord, Put, Strike, Tier, TransferReport, Use

_ABANDONED = JobState.ABANDONED

Item = TypeVar("Item")
Ask = tuple[RequestId, tuple[BlockKey, ...]]

MOST_HINTS = 2**17
MOST_ASKED = 4096
"""Keys of one request: Mooncake's master takes some 9 microseconds for each."""


_MOST_BYTES = 64 * 2**20  # on a rank: what a load or a fetch may find before it on a disk, some 50 ms
_EIGHTH = 1 / 8


class LowerTier:
    """One tier below the host.

    Args:
        tier: its name.
        after_hits: a block is written to the tier when it was found again this often.
        jobs: the open ones.

    Attributes:
        takes_all: blocks are written to it although they were never found again.
        pool: its slots.
        is_open: what it holds is known.
        is_closed: it cannot be used any more, or not for now.
        failing: ranks whose calls fail or hang.
        in_flight: keys that open spills bring to the tier.
        limit: on the blocks of open spills and of a warm start, as a share of the most.
        slot_bytes: of a host slot, the most that any rank has reported.
        least_tokens: additions to a hit that are shorter are computed instead.
        candidates: keys that were found again and may be worth a spill, in the order in which the host evicts them.
        namespace: of the blocks in a store that engines share.
    """

    namespace = ""

    def __init__(self, tier: Tier, after_hits: int, jobs: Jobs) -> None:
        self.tier = tier
        self.takes_all = not after_hits
        self._after_hits = after_hits
        self._hits: dict[BlockKey, int] = {}
        self.pool = HostPool()
        self.is_open = False
        self.is_closed = False
        self.failing: set[Rank] = set()
        self.limit = AdaptiveLimit(1.0, _EIGHTH, _EIGHTH)
        self.slot_bytes = 1
        self.least_tokens = 0
        self.in_flight = InFlight()
        self.candidates: deque[BlockKey] = deque()
        self._waiting: set[BlockKey] = set()  # the same keys
        self._spills, self._fetches = [jobs.by_state[tier, way] for way in (Direction.STORE, Direction.LOAD)]

    @property
    def is_usable(self) -> bool:
        """Whether a copy may begin."""
        has_timed_out = self._spills[_ABANDONED] or self._fetches[_ABANDONED]
        return self.is_open and not self.is_closed and not self.failing and not has_timed_out

    @property
    def fetching(self) -> int:
        """How many blocks fetches bring from it: those pin its slots until their outcome is known, and nothing else does."""
        return len(self.pool.pins)

    @property
    def has_blocks(self) -> bool:
        """Whether any block can be found."""
        return bool(self.pool.count(SlotState.READY) or self.pool.count(SlotState.PINNED))

    def close(self) -> None:
        """Use the tier no more, or not until it is opened again."""
        self.is_closed = True

    def rank_reported(self, report: TransferReport) -> None:
        """Note what a rank reports of its calls to the tier."""
        works = report.disk_works if self.tier is Tier.DISK else report.remote_works
        if works == (report.rank in self.failing):
            self.failing ^= {report.rank}
        if report.slot_bytes > self.slot_bytes:
            self.slot_bytes = report.slot_bytes

    def spill_slots(self, capacity: int) -> int:
        """Return the limit in blocks for a host of this capacity: at most an eighth of it."""
        most = min(_MOST_BYTES // self.slot_bytes, capacity // 8)
        return max(int(most * self.limit.share), 1)

    def spill_ended(self, job: Spill, last: JobId, *, is_load_open: bool) -> None:
        """Learn from a spill that every rank has written.

        Args:
            job: the spill.
            last: the job that was planned last.
            is_load_open: whether a load or a fetch is open.
        """
        size = len(job.slots)
        self.limit.ended(
            size, job.copy_s, size.bit_length(), began=job.id, now=last + 1, beside_load=is_load_open
        )

    # -- jobs ---------------------------------------------------------------------------------------------------

    def targets(self, keys: list[BlockKey], tier_slots: list[SlotId]) -> list[Any]:
        """Return what a job's copies have at their other end."""
        return tier_slots

    def extra(self, tier_slots: Sequence[SlotId] = ()) -> object:
        """Return what else the workers must know of a fetch from these slots; without slots, of a spill."""
        return ()

    # -- blocks -------------------------------------------------------------------------------------------------

    def reuse(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks were found again, a prefix's head last."""
        on_tier, spilling = self.pool.index.parts, self.in_flight.keys
        for key in keys:
            if key in on_tier[key[0]] or key in self._waiting or key in spilling:
                continue
            hits = self._hits.pop(key, 0) + 1
            if hits < self._after_hits:
                self._hits[key] = hits
            else:
                self._waiting.add(key)
                self.candidates.append(key)

    def take_candidates(self, count: int) -> list[BlockKey]:
        """Return up to `count` candidates, and forget them."""
        keys = [self.candidates.popleft() for _ in range(min(count, len(self.candidates)))]
        self._waiting.difference_update(keys)
        return keys

    def evicted(self, keys: Sequence[BlockKey]) -> int:
        """Note that these blocks have left the host; return how many of them waited for a spill."""
        if self._hits:
            for key in keys:
                self._hits.pop(key, None)
        return len(self._waiting.intersection(keys)) if self._waiting else 0

    def put(self, job: Spill) -> None:
        """Note that every rank has written a job's blocks."""

    def read(self, tier_slots: Sequence[SlotId]) -> None:
        """Note that every rank has read these slots for a request."""

    def invalidate(self, tier_slot: SlotId) -> None:
        """Forget what the tier has in this slot, besides its state."""

    def forget_all(self) -> int:
        """Forget all blocks; return how many of them left the tier."""
        self.candidates.clear()
        self._waiting.clear()
        self._hits.clear()
        return len(self.pool.forget_all())


class DiskTier(LowerTier):
    """The disk. It opens when all of its index was read, and closes for good.

    Slots without space on the disk are in the pool too, and never allocated.

    Args:
        after_hits, jobs: as of `LowerTier`.
        ranks: how many write each block.

    Attributes:
        capacity: slots that have space, as far as the index was read.
        has_block: by slot, 1 where it has a block that can hit.
        sums: by rank and slot, the checksum of the rank's shard of that block; 0 without a block. Arrays, because a dict would now
            and then copy itself inside a hook, and tuples would need several times the memory and slow the garbage collector.
    """

    def __init__(self, after_hits: int, jobs: Jobs, ranks: int) -> None:
        super().__init__(Tier.DISK, after_hits, jobs)
        self.capacity = 0
        self.has_block = bytearray()
        self.sums = [array("Q") for _ in range(ranks)]
        self.records: list[DiskRecord] = []
        """What the index must record, in order."""

    def restore(self, slots: int, puts: Sequence[Put], free: Sequence[SlotId], *, is_last: bool) -> None:
        """Take over a part of the index of an earlier process; the disk opens with the last part."""
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
        self._add(new)
        self.is_open = is_last

    def take_records(self) -> list[DiskRecord]:
        """Return what the index must record since the last call, and forget it."""
        return _take(self.records)

    def extra(self, tier_slots: Sequence[SlotId] = ()) -> object:
        """Return for each slot every rank's checksum."""
        if not tier_slots:
            return ()
        return tuple(zip(*[[of_rank[slot] for slot in tier_slots] for of_rank in self.sums], strict=True))

    def put(self, job: Spill) -> None:
        sums = zip(*[job.sums[rank] for rank in sorted(job.sums)], strict=True)
        puts = list(map(Put, job.tier_slots, job.keys, sums))
        self._add(puts)
        self.records += reversed(puts)  # so that the next process, too, evicts a prefix's head last

    def read(self, tier_slots: Sequence[SlotId]) -> None:
        # A late report of an earlier fetch may have found a slot corrupt, which removed its block from the index.
        self.records += [Use(slot) for slot in tier_slots if self.has_block[slot]]

    def invalidate(self, tier_slot: SlotId) -> None:
        """Remove a slot's block from the index."""
        if self.has_block[tier_slot]:
            self.has_block[tier_slot] = 0
            for of_rank in self.sums:
                of_rank[tier_slot] = 0
            self.records.append(Strike(tier_slot))

    def forget_all(self) -> int:
        """Forget all blocks; return how many. Nothing is recorded, as the index itself is removed."""
        slots = len(self.has_block)
        self.has_block = bytearray(slots)
        self.sums = [array("Q", bytes(8 * slots)) for _ in self.sums]
        self.records.clear()
        return super().forget_all()

    def _add(self, puts: Sequence[Put]) -> None:
        """Note the checksums of blocks in slots that had none."""
        has_block = self.has_block
        for put in puts:
            has_block[put.slot] = 1
        for rank, of_rank in enumerate(self.sums):
            for put in puts:  # `zip(*...)` would make an object a block that the garbage collector counts
                of_rank[put.slot] = put.sums[rank]


class RemoteTier(LowerTier):
    """A remote store. It is open once its namespace is known, and closed while it does not answer.

    Args:
        after_hits, jobs: as of `LowerTier`.
        ranks: none of which has reached the store yet.
    """

    def __init__(self, after_hits: int, jobs: Jobs, ranks: Iterable[Rank]) -> None:
        super().__init__(Tier.REMOTE, after_hits, jobs)
        self.pool.grow(MOST_HINTS)
        self.failing = set(ranks)
        self.asks: list[Ask] = []
        """Requests, and keys that the store must be asked for."""

    def open(self, namespace: str) -> None:
        """Begin, or go on, to use a namespace of the store."""
        self.namespace = namespace
        self.is_open = True
        self.is_closed = False

    def ask(self, request: RequestId, keys: Sequence[BlockKey]) -> None:
        """Have the store asked for some of a request's blocks."""
        self.asks.append((request, tuple(keys[:MOST_ASKED])))

    def take_asks(self) -> list[Ask]:
        """Return what the store must be asked since the last call, and forget it."""
        return _take(self.asks)

    def note(self, found: Sequence[BlockKey], missing: Sequence[BlockKey]) -> None:
        """Keep what the store answered; without room for all of `found`, the first of them."""
        index, spilling = self.pool.index, self.in_flight.keys
        for key in missing:
            if (slot := index.get(key)) is not None:
                self.pool.invalidate(slot)
        new = [key for key in dict.fromkeys(found) if key not in index and key not in spilling]
        slots, _ = self.pool.reserve(new[: self.pool.room])
        self.pool.fill(slots[::-1])

    def targets(self, keys: list[BlockKey], tier_slots: list[SlotId]) -> list[Any]:
        return keys

    def extra(self, tier_slots: Sequence[SlotId] = ()) -> object:
        """Return the namespace."""
        return self.namespace

    def forget_all(self) -> int:
        """Forget all hints and the namespace; return how many hints there were."""
        self.namespace = ""  # what is written now has no name yet
        self.is_open = False
        self.asks.clear()
        return super().forget_all()


def _take(items: list[Item]) -> list[Item]:
    """Empty a list that others keep, and return what it held."""
    taken = items.copy()
    items.clear()
    return taken


# -- searches -------------------------------------------------------------------------------------------------------

Block = tuple[BlockKey, LowerTier, SlotId]
"""A block's key, the lower tier that has it, and its slot there."""

ON_DEVICE = SlotId(sys.maxsize)
"""Stands for a block that the device has."""


class LayeredIndex:
    """Several indexes as one. The host's slots are found as they are; a number below zero stands for a block of a lower tier.

    Args:
        host: the keys that can hit there.
        tiers: below the host; the first that has a key counts.
        device: asked after the host, for blocks that need no slot; None where the search begins behind what the device has.

    Attributes:
        get: return a key's slot, None where none has it.
        parts: what `get` finds, whatever the byte.
    """

    __slots__ = ("_found", "get", "parts")

    def __init__(self, host: KeyIndex, tiers: Sequence[LowerTier], device: BlockPool | None = None) -> None:
        on_host, lower = host.parts, [(tier, tier.pool.index.parts) for tier in tiers]
        block_of = None if device is None else device.block_of
        found = self._found = list[Block]()

        def get(key: BlockKey, /) -> SlotId | None:
            byte = key[0]
            slot = on_host[byte].get(key)
            if slot is not None:
                return slot
            if block_of is not None and block_of(key) is not None:
                return ON_DEVICE
            for tier, parts in lower:
                if (tier_slot := parts[byte].get(key)) is not None:
                    found.append((key, tier, tier_slot))
                    return -len(found)  # type: ignore[return-value]  # a `SlotId` of its own would be a call a block
            return None

        self.get = get
        # Only `get`: a reference to `self` would keep `_found` alive until the garbage collector runs.
        self.parts = (SimpleNamespace(get=get),) * 256

    def on_tiers(self, slots: Iterable[SlotId]) -> list[Block]:
        """Return the blocks of lower tiers among slots that `get` returned, in their order."""
        found = self._found
        return [found[-1 - slot] for slot in slots if slot < 0]
