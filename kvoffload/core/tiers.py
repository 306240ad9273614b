"""The tiers below the host, and an index that searches them together with the host.

Each tier keeps its slots in the same kind of pool as the host. A disk slot stands for the same slot in every rank's
file. A remote tier manages its blocks itself, and other engines write to the tier, too; and other engines of the machine
write their own memory. So a slot of such a tier is only a hint that the tier has a block, and the pool's size limits the
number of hints. A fetch that finds nothing removes the hint.

After a spill to a full remote tier, the tier may already have evicted the block again. So the hint of
a spill prevents a second spill, but no request fetches the block until an answer of the tier has confirmed the hint.

`tier_store` copies blocks, and `lower_tiers` decides which, for requests.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from kvoffload.core.jobs import InFlight, Jobs, Spill
from kvoffload.core.key_index import KeyIndex
from kvoffload.core.machine import JobState, SlotState
from kvoffload.core.slots import SlotPool
from kvoffload.model.engine import BlockPool
from kvoffload.model.ids import BlockKey, JobId, Rank, RequestId, SlotId
from kvoffload.model.limit import AdaptiveLimit
from kvoffload.model.wire import Direction, DiskRecord, Invalidate, NodeSlot, Put, Tier, Use

_ABANDONED = JobState.ABANDONED

Ask = tuple[RequestId, tuple[BlockKey, ...]]

MOST_HINTS = 2**17
_MOST_COUNTED = 2**17
"""Of how many blocks a tier remembers how often they were found."""
MOST_ASKED = 4096
"""The maximum number of keys to query per request. Mooncake's master takes about 9 microseconds per key."""
_MOST_BYTES = 64 * 2**20
"""The maximum size of a rank's open spills, in bytes.

The next load or fetch waits for these spills, about 50 ms on a disk.
"""
_EIGHTH = 1 / 8


class LowerTier:
    """One tier below the host.

    Args:
        after_hits: how often lookups must find a block before it is written to the tier.
        jobs: the open jobs.
        ranks: the ranks that write each block.

    Attributes:
        tier: the tier's name, a class attribute.
        for_catalog: what the tier's catalog on the scheduler's side must do, in order: records to write, or queries.
        capacity: the number of slots that have space in the tier; 0 if the tier manages its blocks itself.
        takes_all: True if the tier gets every stored block, even before a lookup finds the block again.
        pool: the tier's slots.
        is_open: True once the disk's index has been read, or the remote tier's namespace is known.
        is_closed: True while the tier cannot be used; for the disk this is final.
        failing: ranks whose calls to the tier fail or hang.
        in_flight: keys that open spills are bringing to the tier.
        limit: the adaptive limit on blocks in open spills and in a warm start's fetch.
        slot_bytes: the largest size of a host slot on any rank, in bytes.
        least_tokens: the fewest tokens that a fetch must add to a hit; fewer tokens are recomputed.
        candidates: keys that were found again and may be spilled, in the order in which the host evicts them.
        namespace: the namespace of this engine's blocks in a remote tier; empty for the disk.
        unconfirmed: keys of blocks that spills have written to a remote tier and no answer has confirmed; empty for the
            disk.
    """

    tier: ClassVar[Tier]
    namespace = ""

    def __init__(self, after_hits: int, jobs: Jobs, ranks: Sequence[Rank]) -> None:
        self.for_catalog: list[Any] = []
        self.capacity = 0
        self.takes_all = not after_hits
        self._after_hits = after_hits
        self._hits: dict[BlockKey, int] = {}
        self.pool = SlotPool()
        self.is_open = False
        self.is_closed = False
        self.failing: set[Rank] = set()
        self.limit = AdaptiveLimit(1.0, _EIGHTH, _EIGHTH)
        self.slot_bytes = 1
        self.least_tokens = 0
        self.in_flight = InFlight()
        self.candidates: deque[BlockKey] = deque()
        self.unconfirmed: set[BlockKey] = set()
        self._waiting: set[BlockKey] = set()  # the same keys as in `candidates`
        self._spills, self._fetches = [
            jobs.by_state[self.tier, way] for way in (Direction.STORE, Direction.LOAD)
        ]

    @property
    def is_usable(self) -> bool:
        """Return whether new copies to and from the tier may start."""
        has_timed_out = self._spills[_ABANDONED] or self._fetches[_ABANDONED]
        return self.is_open and not self.is_closed and not self.failing and not has_timed_out

    @property
    def fetching(self) -> int:
        """Return the number of blocks in open fetches from the tier."""
        return len(self.pool.pins)

    @property
    def has_blocks(self) -> bool:
        """Return whether lookups can find any block on the tier."""
        return bool(self.pool.count(SlotState.READY) or self.pool.count(SlotState.PINNED))

    def open(self, namespace: str) -> None:
        """Start using a tier that manages its blocks itself, in this namespace."""
        self.namespace = namespace
        self.is_open = True
        self.is_closed = False

    def close(self) -> None:
        """Stop using the tier. Only a tier that manages its blocks itself can open again."""
        self.is_closed = True

    def rank_reported(self, rank: Rank, slot_bytes: int, *, works: bool) -> None:
        """Record whether a rank's calls to the tier work, and how large the rank's host slots are."""
        if works == (rank in self.failing):
            self.failing ^= {rank}
        if slot_bytes > self.slot_bytes:
            self.slot_bytes = slot_bytes

    def take_for_catalog(self) -> list[Any]:
        """Return what was added to `for_catalog` since the last call."""
        taken = self.for_catalog.copy()
        self.for_catalog.clear()  # in place: hooks look at the list
        return taken

    def spill_slots(self, capacity: int) -> int:
        """Return how many blocks open spills may contain: at most an eighth of the host's `capacity`."""
        most = min(_MOST_BYTES // self.slot_bytes, capacity // 8)
        return max(int(most * self.limit.share), 1)

    def spill_ended(self, job: Spill, last: JobId, *, is_load_open: bool) -> None:
        """Adapt the limit to a spill that every rank has written.

        Args:
            job: the spill.
            last: the id of the most recently planned job.
            is_load_open: True if a load or a fetch is open.
        """
        size = len(job.slots)
        self.limit.ended(
            size, job.copy_s, size.bit_length(), began=job.id, now=last + 1, beside_load=is_load_open
        )

    def restore(
        self, slots: int, puts: Sequence[Put], free: Sequence[SlotId], *, is_last: bool
    ) -> Sequence[Put]:
        """Add a part of the tier's slots, with blocks of an earlier process. The last part opens the tier.

        Return the blocks that are new on the tier.
        """
        known = self.pool.index.parts
        new = [put for put in puts if put.key not in known[put.key[0]]]
        blocks = {put.slot: put.key for put in new}
        twice = () if len(new) == len(puts) else [put.slot for put in puts if put.slot not in blocks]
        self.pool.adopt(slots, blocks, (*free, *twice))
        self.capacity += len(puts) + len(free)
        self.is_open = is_last
        return new

    # -- jobs ---------------------------------------------------------------------------------------------------

    def targets(self, keys: list[BlockKey], tier_slots: list[SlotId]) -> list[Any]:
        """Return the `Job.targets` of a job that copies these keys to or from these slots."""
        return tier_slots

    def extra(self, tier_slots: Sequence[SlotId] = ()) -> object:
        """Return a job's `Job.extra`. A fetch passes the slots that it reads, and a spill passes none."""
        return ()

    # -- blocks -------------------------------------------------------------------------------------------------

    def reuse(self, keys: Sequence[BlockKey]) -> None:
        """Record that lookups found these blocks again. Keys are listed deepest first."""
        on_tier, spilling = self.pool.index.parts, self.in_flight.keys
        for key in keys:
            if key in on_tier[key[0]] or key in self._waiting or key in spilling:
                continue
            if self._after_hits <= 1 or self.is_wanted(key):
                self._waiting.add(key)
                self.candidates.append(key)

    def is_wanted(self, key: BlockKey) -> bool:
        """Count that a block was found again; return whether the block should be written to the tier now."""
        hits = self._hits.pop(key, 0) + 1
        if hits >= self._after_hits:
            return True
        self._hits[key] = hits
        if len(self._hits) > _MOST_COUNTED:
            del self._hits[next(iter(self._hits))]
        return False

    def take_candidates(self, count: int) -> list[BlockKey]:
        """Remove and return the first `count` candidates, or all if there are fewer."""
        keys = [self.candidates.popleft() for _ in range(min(count, len(self.candidates)))]
        self._waiting.difference_update(keys)
        return keys

    def count_candidates(self, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks that the host evicts were candidates for a spill."""
        return len(self._waiting.intersection(keys)) if self._waiting else 0

    def put(self, job: Spill) -> None:
        """Record that every rank has written a spill's blocks."""

    def read(self, tier_slots: Sequence[SlotId]) -> None:
        """Record a use of these slots: every rank has read them for a request."""

    def invalidate(self, tier_slot: SlotId) -> None:
        """Record that the block in a slot was removed. The caller changes the slot's state in the pool."""

    def forget_all(self) -> int:
        """Remove all blocks and candidates, and what the catalog has not done yet; return the number of removed blocks."""
        self.for_catalog.clear()
        self.candidates.clear()
        self._waiting.clear()
        self._hits.clear()
        return len(self.pool.forget_all())


class DiskTier(LowerTier):
    """The disk. The tier opens when its whole index has been read. Once closed, it stays closed.

    The pool also has slots for which there is no space on the disk. Such slots are never allocated.

    Attributes:
        capacity: the number of slots with space on the disk, in the parts of the index read so far.
        has_block: for each slot, 1 if it has a block that can hit, else 0.
        sums: for each rank and slot, the checksum of the rank's shard of the block; 0 without a block. `has_block` and
            `sums` are arrays because a dict would sometimes be rebuilt inside a hook, and tuples would need several
            times the memory and slow down the garbage collector.
    """

    tier = Tier.DISK

    def __init__(self, after_hits: int, jobs: Jobs, ranks: Sequence[Rank]) -> None:
        super().__init__(after_hits, jobs, ranks)
        self.for_catalog: list[DiskRecord] = []
        self.has_block = bytearray()
        self.sums = [array("Q") for _ in ranks]

    def restore(
        self, slots: int, puts: Sequence[Put], free: Sequence[SlotId], *, is_last: bool
    ) -> Sequence[Put]:
        new = super().restore(slots, puts, free, is_last=is_last)
        more = slots - len(self.has_block)
        self.has_block.extend(bytes(more))
        for of_rank in self.sums:
            of_rank.frombytes(bytes(8 * more))
        self._add(new)
        return new

    def extra(self, tier_slots: Sequence[SlotId] = ()) -> object:
        """Return each rank's checksums of these slots; nothing for a spill, whose checksums are not known yet."""
        if not tier_slots:
            return ()
        return tuple(zip(*[[of_rank[slot] for slot in tier_slots] for of_rank in self.sums], strict=True))

    def put(self, job: Spill) -> None:
        sums = zip(*[job.sums[rank] for rank in sorted(job.sums)], strict=True)
        puts = list(map(Put, job.tier_slots, job.keys, sums))
        self._add(puts)
        # Deepest first, so that the next process also evicts a prefix's head last.
        self.for_catalog += reversed(puts)

    def read(self, tier_slots: Sequence[SlotId]) -> None:
        # Another fetch may have found a block corrupt and removed it.
        self.for_catalog += [Use(slot) for slot in tier_slots if self.has_block[slot]]

    def invalidate(self, tier_slot: SlotId) -> None:
        """Remove a slot's checksums, and record the removal for the disk's index."""
        if self.has_block[tier_slot]:
            self.has_block[tier_slot] = 0
            for of_rank in self.sums:
                of_rank[tier_slot] = 0
            self.for_catalog.append(Invalidate(tier_slot))

    def forget_all(self) -> int:
        """Remove all blocks; return their number. No removal is recorded, because a reset deletes the disk's index."""
        slots = len(self.has_block)
        self.has_block = bytearray(slots)
        self.sums = [array("Q", bytes(8 * slots)) for _ in self.sums]
        return super().forget_all()

    def _add(self, puts: Sequence[Put]) -> None:
        """Store the checksums of new blocks."""
        has_block = self.has_block
        for put in puts:
            has_block[put.slot] = 1
        for rank, of_rank in enumerate(self.sums):
            # `zip(*...)` would create one object per block for the garbage collector to track.
            for put in puts:
                of_rank[put.slot] = put.sums[rank]


class HintTier(LowerTier):
    """A tier whose blocks other engines write, so that its slots are only hints that the tier has a block.

    A rank counts as failing until it reports that its calls to the tier work.
    """

    def __init__(self, after_hits: int, jobs: Jobs, ranks: Sequence[Rank]) -> None:
        super().__init__(after_hits, jobs, ranks)
        self.failing = set(ranks)

    def note(self, found: Sequence[BlockKey], missing: Iterable[BlockKey]) -> None:
        """Record which blocks the tier has and lacks. If hints of all `found` keys do not fit, record the first keys."""
        index, spilling = self.pool.index, self.in_flight.keys
        self.unconfirmed.difference_update(found, missing)
        for key in missing:
            if (slot := index.get(key)) is not None:
                self.pool.invalidate(slot)
        new = [key for key in dict.fromkeys(found) if key not in index and key not in spilling]
        slots, evicted = self.pool.reserve(new[: self.pool.room])
        self.unconfirmed.difference_update(evicted)
        self.pool.fill(slots[::-1])


class Neighbours(Protocol):
    """The host memory of other engines on this machine."""

    @property
    def is_empty(self) -> bool:
        """Return whether no other engine has any block."""

    def find(self, keys: Sequence[BlockKey], /) -> list[BlockKey]:
        """Return those of the keys whose blocks another engine has. Never waits."""

    def places(self, keys: Sequence[BlockKey], /) -> list[NodeSlot]:
        """Return where each block is."""


class _NoNeighbours:
    is_empty = True

    def find(self, _: Sequence[BlockKey], /) -> list[BlockKey]:
        return []

    def places(self, keys: Sequence[BlockKey], /) -> list[NodeSlot]:
        return [NodeSlot()] * len(keys)


class NodeTier(HintTier):
    """The host memory of other engines on this machine. Blocks are fetched from it and never written to it.

    Attributes:
        neighbours: the other engines.
    """

    tier = Tier.NODE

    def __init__(self, after_hits: int, jobs: Jobs, ranks: Sequence[Rank]) -> None:
        super().__init__(after_hits, jobs, ranks)
        self.neighbours: Neighbours = _NoNeighbours()

    def look_for(self, keys: Sequence[BlockKey]) -> None:
        """Find out which blocks other engines have. The pool has as many slots as there were hints at once."""
        found = self.neighbours.find(keys)
        if (lacking := len(found) - self.pool.room) > 0:
            self.pool.grow(min(self.pool.capacity + lacking, MOST_HINTS))
        self.note(found, set(keys).difference(found))

    def reuse(self, keys: Sequence[BlockKey]) -> None:
        """Do nothing, because blocks are not written to this tier."""

    def targets(self, keys: list[BlockKey], tier_slots: list[SlotId]) -> list[Any]:
        return self.neighbours.places(keys)


class RemoteTier(HintTier):
    """A remote tier, which must be asked for a request's blocks.

    The tier is open once its namespace is known, and closed while it does not answer.
    """

    tier = Tier.REMOTE

    def __init__(self, after_hits: int, jobs: Jobs, ranks: Sequence[Rank]) -> None:
        super().__init__(after_hits, jobs, ranks)
        self.for_catalog: list[Ask] = []
        self.pool.grow(MOST_HINTS)

    def ask(self, request: RequestId, keys: Sequence[BlockKey]) -> None:
        """Add a query for a request's blocks, up to `MOST_ASKED` of them."""
        self.for_catalog.append((request, tuple(keys[:MOST_ASKED])))

    def put(self, job: Spill) -> None:
        indexed_key = self.pool.indexed_key
        self.unconfirmed.update(
            [key for key, slot in zip(job.keys, job.tier_slots, strict=True) if indexed_key(slot) == key]
        )

    def invalidate(self, tier_slot: SlotId) -> None:
        if (key := self.pool.key(tier_slot)) is not None:
            self.unconfirmed.discard(key)

    def targets(self, keys: list[BlockKey], tier_slots: list[SlotId]) -> list[Any]:
        return keys

    def extra(self, tier_slots: Sequence[SlotId] = ()) -> object:
        return self.namespace

    def forget_all(self) -> int:
        """Remove all hints and the namespace; return the number of removed hints."""
        self.namespace = ""  # the new namespace is not known yet
        self.is_open = False
        self.unconfirmed.clear()
        return super().forget_all()


# -- searches -------------------------------------------------------------------------------------------------------

Block = tuple[BlockKey, LowerTier, SlotId]
"""A block's key, the lower tier that has it, and its slot there."""

ON_DEVICE = SlotId(sys.maxsize)
"""Stands in for the slot of a block that is on the device."""


class LayeredIndex:
    """Searches several indexes as one. Results are host slots, `ON_DEVICE`, or negative numbers for lower tiers.

    Args:
        host: the host's index.
        tiers: the lower tiers, in the order in which they are searched.
        device: the block pool to search after the host, or None to search no device. The slot of a block found there
            is `ON_DEVICE`.

    Attributes:
        get: returns a key's slot, or None. Searches call `get` for each block, so it is a closure, for speed.
        parts: for each first byte of a key, an object with the same `get`, as in `KeyIndex`.
    """

    __slots__ = ("_found", "get", "parts")

    def __init__(self, host: KeyIndex, tiers: Sequence[LowerTier], device: BlockPool | None = None) -> None:
        on_host = host.parts
        lower = [(tier, tier.pool.index.parts, tier.unconfirmed) for tier in tiers]
        block_of = None if device is None else device.block_of
        found: list[Block] = []
        self._found = found

        def get(key: BlockKey, /) -> SlotId | None:
            byte = key[0]
            slot = on_host[byte].get(key)
            if slot is not None:
                return slot
            if block_of is not None and block_of(key) is not None:
                return ON_DEVICE
            for tier, parts, unconfirmed in lower:
                if (tier_slot := parts[byte].get(key)) is not None and key not in unconfirmed:
                    found.append((key, tier, tier_slot))
                    return -len(found)  # type: ignore[return-value]  # calling `SlotId` for each block would take time
            return None

        self.get = get
        # Store only `get`: with a reference to `self`, `_found` would stay alive until the garbage collector runs.
        self.parts = (SimpleNamespace(get=get),) * 256

    def on_tiers(self, slots: Iterable[SlotId]) -> list[Block]:
        """Return the blocks on lower tiers among slots that `get` returned, in the same order."""
        found = self._found
        return [found[-1 - slot] for slot in slots if slot < 0]
