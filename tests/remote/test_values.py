from __future__ import annotations

from kvoffload.model.ids import BlockKey
from kvoffload.remote.values import Shard


def test_r18_each_generation_and_each_part_of_a_block_has_its_own_name() -> None:
    shards = [Shard(namespace, rank, 2) for namespace in ("print/old", "print/new") for rank in (0, 1)]
    assert len({shard.name(BlockKey(b"key")) for shard in shards}) == 4
