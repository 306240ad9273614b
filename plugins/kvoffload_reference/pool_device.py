"""The reference engine's block pool as the core's device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvoffload.engine.block_pool import BlockPool
from kvoffload.model.ids import BlockKey, DeviceBlockId


class PoolDevice:
    """Leases are the plugin's references on the engine's blocks."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the pool, which the engine makes after the plugin."""
        self._pool = pool

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._bound.touch(blocks)

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._bound.free(blocks)

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        return map(DeviceBlockId, self._bound.next_evictable(count))

    def free_blocks(self) -> int:
        return self._bound.free_blocks

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> list[BlockKey | None]:
        key_of = self._bound.key_of
        return [None if (key := key_of(block)) is None else BlockKey(key) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        block = self._bound.cached_block(key)
        return DeviceBlockId(block) if block is not None else None

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        """The engine counts leases separately, so they can be compared one by one."""
        counted = self._pool.leases() if self._pool is not None else {}
        return [
            f"block {block} is leased {leases.get(DeviceBlockId(block), 0)} times, the engine counts {counted.get(block, 0)}"
            for block in sorted(leases.keys() | counted.keys())
            if leases.get(DeviceBlockId(block), 0) != counted.get(block, 0)
        ]

    @property
    def _bound(self) -> BlockPool:
        assert self._pool is not None, "bind() comes first"
        return self._pool
