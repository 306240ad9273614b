"""The longest prefix of a request that the device still holds in every group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.engine.block_pool import NULL_BLOCK
from kvoffload.engine.groups import first_needed_block

if TYPE_CHECKING:
    from kvoffload.engine.block_pool import BlockPool
    from kvoffload.engine.plugin import GroupFacts

#: The block that holds a position of a group, or None.
FindBlock = Callable[[int], int | None]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix of whole blocks. `tables` has, per group, one id for each of its positions; null where not needed."""

    blocks: int
    tables: tuple[tuple[int, ...], ...]
    full_blocks: int = 0  # of the longer prefix that the groups of full attention hold


def find_prefix(
    pool: BlockPool, groups: Sequence[GroupFacts], keys: Sequence[Sequence[bytes]], max_blocks: int
) -> PrefixHit:
    """The longest hit of at most `max_blocks` blocks. Changes nothing: hold its blocks before allocating any.

    Each group shortens the prefix until all agree. Full groups go first: their hits are prefixes of each other, so
    they are searched once and bound the others' search.
    """
    finders = [_finder(pool, group_keys) for group_keys in keys]
    blocks = full_blocks = min(
        [_full_length(finders[g.index], max_blocks) for g in groups if g.kind == "full"], default=max_blocks
    )
    local = [group for group in groups if group.kind != "full"]
    while (shorter := _shorten(local, finders, blocks)) < blocks:
        blocks = shorter
    tables = tuple(_table(group, finders[group.index], blocks) for group in groups)
    return PrefixHit(blocks, tables, full_blocks)


def _shorten(groups: Sequence[GroupFacts], finders: Sequence[FindBlock], blocks: int) -> int:
    for group in groups:
        blocks = _local_length(group, finders[group.index], blocks)
    return blocks


def _full_length(find: FindBlock, max_blocks: int) -> int:
    return next((position for position in range(max_blocks) if find(position) is None), max_blocks)


def _local_length(group: GroupFacts, find: FindBlock, blocks: int) -> int:
    """The longest length up to `blocks` at which the group holds all that the next token sees."""
    start, position = blocks, blocks  # held: [position, blocks)
    while position > first_needed_block(group, start * group.block_tokens):
        position -= 1
        if find(position) is None:
            start = position  # no prefix that needs this position can hit; a shorter one may
    return start


def _table(group: GroupFacts, find: FindBlock, blocks: int) -> tuple[int, ...]:
    first = first_needed_block(group, blocks * group.block_tokens)
    return (NULL_BLOCK,) * first + tuple(find(position) or NULL_BLOCK for position in range(first, blocks))


def _finder(pool: BlockPool, keys: Sequence[bytes]) -> FindBlock:
    return lambda position: pool.cached_block(keys[position])
