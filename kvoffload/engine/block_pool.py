"""The pool of device blocks that all groups share, and its index of the blocks' contents.

A block is free when it has no references. A free block keeps its contents, and its key in the index, until it is
reused: this is the prefix cache. The pool counts two kinds of references separately, so that an audit can report which
kind leaked:

    held by requests       allocate, hold -> release
    leased to a plugin     touch          -> free

Block 0 is the null block. The null block fills table positions for which a request holds no block, and is never
allocated.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice

NULL_BLOCK = 0


class BlockPool:
    """The reference counts and keys of blocks 1 to `num_blocks - 1`. The pool holds no tensors."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held = [0] * num_blocks
        self._leased = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        # several blocks per key, because two blocks may hold the same tokens
        self._index: dict[bytes, dict[int, None]] = {}
        # Free blocks in the order in which they will be allocated. Blocks that are found again are removed from the
        # middle. A plain dict with such gaps would take linear time to find its first entry; an OrderedDict does not.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def usable_blocks(self) -> int:
        """Return the number of blocks, not counting the null block."""
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        """Return the number of blocks without references."""
        return len(self._free)

    @property
    def leased_blocks(self) -> int:
        """Return the number of blocks that a plugin has leased."""
        return sum(1 for count in self._leased if count)

    def leases(self) -> dict[int, int]:
        """Return the number of leases of each leased block."""
        return {block: count for block, count in enumerate(self._leased) if count}

    def is_free(self, block: int) -> bool:
        """Return whether the block has no references."""
        return block in self._free

    # --- for the engine ---------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, and remove their keys.

        Raises:
            ValueError: fewer than `count` blocks are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks requested, only {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._drop_key(block)
            self._held[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block for a request."""
        self._refer(self._held, list(blocks))

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a request's references. Blocks become free in the given order."""
        self._unrefer(self._held, list(blocks))

    def index(self, block: int, key: bytes) -> None:
        """Make `block` findable by `key`. The block's contents must be complete."""
        self._drop_key(block)
        self._keys[block] = key
        self._index.setdefault(key, {})[block] = None

    # --- for plugins ------------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[int]) -> None:
        """Lease blocks, so that they are not reused until `free`. A block leased twice must be freed twice.

        Raises:
            ValueError: the ids include the null block or an unknown id; no block is leased then.
        """
        self._refer(self._leased, list(blocks))

    def free(self, blocks: Iterable[int]) -> None:
        """End leases. Blocks without further references become free, and are evicted in the order given.

        Raises:
            ValueError: a block is freed more often than it was leased; no lease ends then.
        """
        self._unrefer(self._leased, list(blocks))

    def key_of(self, block: int) -> bytes | None:
        """Return the key of the block's contents; None while the contents are not complete."""
        return self._keys.get(block)

    def cached_block(self, key: bytes) -> int | None:
        """Return a block with this key, in use or free; None if there is none."""
        blocks = self._index.get(key)
        return next(iter(blocks)) if blocks else None

    def next_evictable(self, count: int) -> list[int]:
        """Return up to `count` free blocks, with or without a key, in the order in which they will be reused."""
        return list(islice(self._free, count))

    # --- for both ---------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Remove all keys. If any block is in use, change nothing and return False."""
        if len(self._free) != self.usable_blocks:
            return False
        self._keys.clear()
        self._index.clear()
        return True

    def audit(self, held: Mapping[int, int]) -> list[str]:
        """Return a message for every broken invariant.

        Args:
            held: each block's number of references in all requests' tables.
        """
        found = [
            f"block {block} has {count} request references, the tables have {held.get(block, 0)}"
            for block, count in enumerate(self._held)
            if count != held.get(block, 0)
        ]
        in_use = {block for block in range(1, self.num_blocks) if self._held[block] or self._leased[block]}
        if in_use & self._free.keys() or len(in_use) + len(self._free) != self.usable_blocks:
            found.append(f"{len(in_use)} blocks in use and {len(self._free)} free of {self.usable_blocks}")
        if {(block, key) for key, blocks in self._index.items() for block in blocks} != set(
            self._keys.items()
        ):
            found.append("the index and the blocks' keys disagree")
        return found

    def _refer(self, counts: list[int], blocks: list[int]) -> None:
        self._check_ids(blocks)
        for block in blocks:
            counts[block] += 1
            self._free.pop(block, None)

    def _unrefer(self, counts: list[int], blocks: list[int]) -> None:
        self._check_ids(blocks)
        for block, count in Counter(blocks).items():
            if counts[block] < count:
                raise ValueError(f"block {block} is released {count} times; references: {counts[block]}")
        for block in blocks:
            counts[block] -= 1
            if not self._held[block] and not self._leased[block]:
                self._make_free(block)

    def _make_free(self, block: int) -> None:
        self._free[block] = None
        if block not in self._keys:  # The block cannot be found, so reuse it before any block in the index.
            self._free.move_to_end(block, last=False)

    def _check_ids(self, blocks: list[int]) -> None:
        if wrong := [block for block in blocks if not NULL_BLOCK < block < self.num_blocks]:
            raise ValueError(
                f"not blocks of this pool: {wrong} (1 to {self.usable_blocks}; 0 is the null block)"
            )

    def _drop_key(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is None:
            return
        del self._index[key][block]
        if not self._index[key]:
            del self._index[key]
