from __future__ import annotations

from kvoffload.model.ids import BlockKey, GroupId


def block_key(block_hash: bytes, group: GroupId) -> BlockKey:
    return BlockKey(block_hash + group.to_bytes(4, "big"))
