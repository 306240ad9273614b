"""Translates the reference engine's types into the core's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.engine.plugin import EngineFacts, GroupFacts
from kvoffload.model.engine import EngineShape, Promises
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId


def shape_of(engine: EngineFacts, promises: Promises) -> EngineShape:
    """Return the engine's shape. Its null block is no block of the pool."""
    return EngineShape(
        groups=tuple(map(_group, engine.groups)),
        ranks=engine.ranks,
        device_blocks=engine.num_blocks - 1,
        step_tokens=engine.step_tokens,
        promises=promises,
    )


def blocks(table: Sequence[int]) -> tuple[DeviceBlockId, ...]:
    """Return one group's table; the engine's null block is 0, and so is ours."""
    return tuple(map(DeviceBlockId, table))


def keys(known: Sequence[bytes]) -> tuple[BlockKey, ...]:
    """Return keys; the engine's are made as ours are."""
    return tuple(map(BlockKey, known))


def _group(group: GroupFacts) -> GroupSpec:
    reach = group.window_tokens if group.window_tokens is not None else group.chunk_tokens
    return GroupSpec(GroupId(group.index), AttentionKind(group.kind), group.block_tokens, reach)
