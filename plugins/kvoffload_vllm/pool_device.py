"""Gives the core access to vLLM's block pool. For each lease of a block, kvoffload holds a reference in the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvoffload.model.errors import EngineContractError
from kvoffload.model.ids import BlockKey, DeviceBlockId
from kvoffload_vllm.support import VERSIONS

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

GROUP_BYTES = 4
"""The length of the group number in a key. In vLLM and in kvoffload, a key is a block hash followed by this number."""


POOL_NAMES = ("gpu_block_pool", "block_pool")
"""The names that a holder of vLLM's block pool may have for it."""

_USED = ("blocks", "free_block_queue", "free_blocks", "get_cached_block", "get_num_free_blocks", "touch")


def find_pool(holder: object) -> BlockPool:
    """Return the block pool of vLLM's cache manager or of its scheduler context.

    Raises:
        EngineContractError: the holder has no block pool, or the pool lacks something that kvoffload uses.
    """
    held = [getattr(holder, name, None) for name in POOL_NAMES]
    pool: Any = next((one for one in held if one is not None), None)
    lacks = [name for name in _USED if not hasattr(pool, name)]
    if lacks:
        what = "no block pool" if pool is None else f"a block pool without {', '.join(lacks)}"
        raise EngineContractError(
            f"vLLM passed a {type(holder).__name__} with {what}, looked for as {' or '.join(POOL_NAMES)}; the connector "
            f"works with {VERSIONS}"
        )
    return pool


class VllmDevice:
    """Adapts vLLM's block pool to the core's interface. Call `bind` after vLLM's scheduler has created the pool.

    Args:
        partly_hashed: the number of tokens in a block, by vLLM's group number, for groups whose blocks have several
            hashes.
    """

    _pool: BlockPool
    """Set by `bind`, which vLLM calls before it schedules the first step."""

    def __init__(self, partly_hashed: Mapping[int, int] | None = None) -> None:
        self._partly_hashed = dict(partly_hashed or {})

    def bind(self, pool: BlockPool) -> None:
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
            return [known[block].block_hash for block in blocks]  # vLLM's `block_hash` is the core's key
        return [self._whole_key(known[block]) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        block_hash, group = split_key(key)
        found = self._pool.get_cached_block(block_hash, [group])
        return DeviceBlockId(found[0].block_id) if found else None

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        """Return a message for each block that has fewer references than leases.

        More references than leases are correct, because requests hold references too.
        """
        counted = {block: self._pool.blocks[block].ref_cnt for block in leases}
        return [
            f"block {block} is leased {count} times, vLLM counts {counted[block]} references"
            for block, count in leases.items()
            if counted[block] < count
        ]

    def _whole_key(self, block: KVCacheBlock) -> BlockKey | None:
        """Return a block's key, or None if the key covers only a part of the block: no lookup uses such keys."""
        key: BlockKey | None = block.block_hash
        tokens = None if key is None else self._partly_hashed.get(split_key(key)[1])
        if tokens is not None and (block.block_hash_num_tokens or 0) % tokens:
            return None
        return key


def split_key(key: BlockKey) -> tuple[bytes, int]:
    """Split a key into the block hash and vLLM's group number."""
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


def group_suffix(number: int) -> bytes:
    """Return the bytes that follow the block hash in every key of a group."""
    return number.to_bytes(GROUP_BYTES, "big")
