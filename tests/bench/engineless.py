"""Runs the scheduler side without an engine: device blocks are only numbers, and no bytes are copied."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence

from kvoffload.model import facts
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, Rank, RequestId
from kvoffload.model.wire import TransferReport
from kvoffload.runtime.scheduler_side import SchedulerSide
from tests.keys import block_key
from tests.settings import make_config

BLOCK_TOKENS = 16
_HASH_BYTES = 32  # engines use SHA-256 hashes
_GROUP = GroupId(0)
_DEVICE_BLOCKS = 4096
_AT_ONCE = 64


class CountedBlocks:
    """A device block pool without memory. It allocates the blocks that have been free for the longest time first."""

    def __init__(self, blocks: int) -> None:
        self._free = deque(map(DeviceBlockId, range(1, blocks + 1)))
        self._references = [0] * (blocks + 1)
        self.keys: dict[DeviceBlockId, BlockKey] = {}
        """The key of each computed block."""

    def take(self, count: int) -> tuple[DeviceBlockId, ...]:
        """Allocate blocks, and remove the blocks' keys."""
        blocks = tuple([self._free.popleft() for _ in range(count)])
        for block in blocks:
            self.keys.pop(block, None)
        self.lease(blocks)
        return blocks

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        return list(self._free)[:count]

    def free_blocks(self) -> int:
        return len(self._free)

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> list[BlockKey | None]:
        return [self.keys.get(block) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        return None


class Engineless:
    """A scheduler side whose `slots` host slots are ready from the start."""

    def __init__(self, slots: int) -> None:
        full = GroupSpec(_GROUP, AttentionKind.FULL, BLOCK_TOKENS)
        shape = EngineShape((full,), ranks=1, device_blocks=_DEVICE_BLOCKS, step_tokens=8192)
        self.side = SchedulerSide(shape, make_config(), CountedBlocks(_DEVICE_BLOCKS))
        self.side.reported([TransferReport(Rank(0), (), slots)])

    def seen(self, name: str, keys: Sequence[BlockKey]) -> RequestId:
        """Add a request whose prompt has one block for each key and one more token. Return the request's id."""
        request = RequestId(name)
        self.side.seen(facts.RequestSeen(request, len(keys) * BLOCK_TOKENS + 1, (tuple(keys),)))
        return request

    def ended(self, request: RequestId) -> None:
        self.side.ended(facts.RequestEnded(request, 0, ((),)))

    def fill(self, draw: random.Random, count: int) -> float:
        """Store `count` new blocks in place of the oldest. Return the longest processor time for 64 blocks."""
        longest = 0.0
        for placed in range(0, count, _AT_ONCE):
            keys = fresh_keys(draw, min(_AT_ONCE, count - placed))
            begun = time.thread_time()
            self.put(keys)
            longest = max(longest, time.thread_time() - begun)
        return longest

    def put(self, keys: Sequence[BlockKey]) -> None:
        """Store blocks in host slots without calling hooks, which would take a hundred times as long."""
        pool = self.side.core.state.pool
        pool.fill(pool.reserve(keys)[0])


def fresh_keys(draw: random.Random, count: int) -> list[BlockKey]:
    return [block_key(draw.randbytes(_HASH_BYTES), _GROUP) for _ in range(count)]
