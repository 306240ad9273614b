"""Gives the core access to vLLM's block pool. Leasing a block takes a reference to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvoffload.model.ids import BlockKey, DeviceBlockId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

GROUP_BYTES = 4
"""A key, in vLLM and in kvoffload, is a block hash followed by vLLM's group number in this many bytes."""


class VllmDevice:
    """vLLM's block pool. `bind` sets it once vLLM's scheduler has created it.

    Args:
        partly_hashed: tokens per block, by vLLM's group number, for the groups in which a part of a block can have its
            own hash.
    """

    _pool: BlockPool
    """vLLM binds the pool before it schedules the first step."""

    def __init__(self, partly_hashed: Mapping[int, int] | None = None) -> None:
        self._partly_hashed = dict(partly_hashed or {})

    def bind(self, pool: BlockPool) -> None:
        """Use this pool from now on."""
        self._pool = pool

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        pool = self._pool
        pool.touch([pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        pool = self._pool
        pool.free_blocks([pool.blocks[block] for block in blocks])

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        free = islice(self._pool.free_block_queue.iter_blocks_after(None), count)
        return (DeviceBlockId(block.block_id) for block in free)

    def free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()  # type: ignore[no-any-return]  # the type checker runs without vLLM

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> list[BlockKey | None]:
        known = self._pool.blocks
        if not self._partly_hashed:
            return [known[block].block_hash for block in blocks]  # vLLM and the core use the same keys.
        return [self._whole_key(known[block]) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        block_hash, group = split_key(key)
        found = self._pool.get_cached_block(block_hash, [group])
        return DeviceBlockId(found[0].block_id) if found else None

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        """Return a line for each block with fewer references than leases. vLLM's own references may add more."""
        counted = {block: self._pool.blocks[block].ref_cnt for block in leases}
        return [
            f"block {block} is leased {count} times, vLLM counts {counted[block]} references"
            for block, count in leases.items()
            if counted[block] < count
        ]

    def _whole_key(self, block: KVCacheBlock) -> BlockKey | None:
        """Return a block's key, or None if the key covers only a part of the block: no lookup asks for such a key."""
        key: BlockKey | None = block.block_hash
        tokens = None if key is None else self._partly_hashed.get(split_key(key)[1])
        if tokens is not None and (block.block_hash_num_tokens or 0) % tokens:
            return None
        return key


def split_key(key: BlockKey) -> tuple[bytes, int]:
    """Split a key into its block hash and vLLM's group number."""
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


def group_suffix(number: int) -> bytes:
    """Return the bytes that follow the block hash in a group's keys."""
    return number.to_bytes(GROUP_BYTES, "big")
