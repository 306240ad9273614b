"""What vLLM lends, through its block pool: leases are references of ours on its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvoffload.model.ids import BlockKey, DeviceBlockId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_GROUP_BYTES = 4  # vLLM's keys end in the group's number, as ours do


class VllmDevice:
    """vLLM's block pool, bound after the scheduler has made it.

    Args:
        partly_hashed: the block tokens of the groups, by vLLM's number, in which a part of a block can have a hash.
    """

    def __init__(self, partly_hashed: Mapping[int, int] | None = None) -> None:
        self._pool: BlockPool | None = None
        self._partly_hashed = dict(partly_hashed or {})

    def bind(self, pool: BlockPool) -> None:
        """Take the pool."""
        self._pool = pool

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        known = self._bound.blocks
        self._bound.touch([known[block] for block in blocks])

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        known = self._bound.blocks
        self._bound.free_blocks([known[block] for block in blocks])

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        return islice(self._free(), count)

    def free_blocks(self) -> int:
        assert self._pool is not None
        return self._pool.get_num_free_blocks()  # type: ignore[no-any-return]  # vLLM is not installed where types are checked

    def key_of(self, block: DeviceBlockId) -> BlockKey | None:
        assert self._pool is not None
        found = self._pool.blocks[block]
        key: BlockKey | None = found.block_hash  # its key is ours
        # A hash of a prompt's end within a block: no lookup asks for it.
        if self._partly_hashed and key is not None and self._is_part(key, found.block_hash_num_tokens):
            return None
        return key

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        found = self._bound.get_cached_block(key[:-_GROUP_BYTES], [_group_of(key)])
        return DeviceBlockId(found[0].block_id) if found else None

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        """A block may have more references, since vLLM counts its own and ours together, but never fewer."""
        if self._pool is None:
            return []
        counted = {block: self._pool.blocks[block].ref_cnt for block in leases}
        return [
            f"block {block} is leased {count} times, vLLM counts {counted[block]} references"
            for block, count in leases.items()
            if counted[block] < count
        ]

    def _is_part(self, key: BlockKey, prefix_tokens: int | None) -> bool:
        block_tokens = self._partly_hashed.get(_group_of(key))
        return block_tokens is not None and (prefix_tokens or 0) % block_tokens != 0

    def _free(self) -> Iterator[DeviceBlockId]:
        for block in self._bound.free_block_queue.iter_blocks_after(None):
            yield DeviceBlockId(block.block_id)

    @property
    def _bound(self) -> BlockPool:
        assert self._pool is not None, "vLLM binds its pool before it schedules"
        return self._pool


def _group_of(key: BlockKey) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
