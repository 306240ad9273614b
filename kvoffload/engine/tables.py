"""Block tables: the blocks of each request, and the search for its longest prefix on the device.

A recurrent group's table holds the state from which the next step continues and, during a step, the new state:

    step ends inside a block      [. . . S]         the next step overwrites S, whose block moves to the table's new end
    step ends at a block's end    [. . . S .  R]    S is kept and can be found: the next step reads S and writes R
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoffload.engine.block_pool import NULL_BLOCK, BlockPool
from kvoffload.engine.groups import first_needed_block
from kvoffload.engine.plugin import GroupFacts, StateMade
from kvoffload.engine.request import Request

#: For each group, the (position, block id) pairs of one allocation.
NewBlocks = tuple[tuple[tuple[int, int], ...], ...]

#: Returns the device block for a position of a group, or None.
FindBlock = Callable[[int], int | None]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix of whole blocks on the device.

    `tables` has a block id for each group and position; the id is null where the group needs no block.
    """

    blocks: int
    tables: tuple[tuple[int, ...], ...]
    full_blocks: int = (
        0  # how many blocks the full-attention groups have on the device; the hit may be shorter
    )


class BlockTables:
    """Allocates, recycles, indexes and releases the blocks of requests.

    Each allocation gets all of its blocks or none.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[GroupFacts]) -> None:
        self._pool = pool
        self._groups = groups
        self._block_tokens = groups[0].block_tokens

    def find_prefix(self, request: Request) -> PrefixHit:
        """Return the longest prefix on the device that leaves at least one token to compute. Changes nothing."""
        keys = [request.keys(group.index) for group in self._groups]
        return find_prefix(self._pool, self._groups, keys, (request.num_tokens - 1) // self._block_tokens)

    def admit(self, request: Request, hit: PrefixHit, seen: int, end: int, reserve: int) -> bool:
        """Give a request its first blocks if `reserve` blocks stay free; otherwise change nothing and return False.

        Tokens from `seen` to `end` will be computed, and tokens below `seen` will not:

            [0 ... hit ... seen)    null if no token from `seen` on can see it, else the hit's block or a new one
            [seen ....... end)      new blocks
        """
        tables = [self._admission_table(group, hit, seen, end) for group in self._groups]
        hits = [block for table in tables for block in table if block]
        fresh = sum(block is None for table in tables for block in table)
        if fresh + sum(map(self._pool.is_free, hits)) + reserve > self._pool.free_blocks:
            return False
        # Nothing after this line can fail. The hits are held first, because the allocation could otherwise evict them.
        self._pool.hold(hits)
        new = iter(self._pool.allocate(fresh))
        request.tables = [[next(new) if block is None else block for block in table] for table in tables]
        request.recycled_blocks = [first_needed_block(group, seen) for group in self._groups]
        request.indexed_blocks = hit.blocks
        request.held_blocks = len(hits) + fresh
        return True

    def grow(self, request: Request, end: int) -> NewBlocks | None:
        """Release blocks that left the window, then allocate blocks up to `end`; return None if too few are free."""
        self._recycle(request)
        total = -(-end // self._block_tokens)
        missing = [
            self._missing(group, total - len(table), request.confirmed_tokens)
            for group, table in zip(self._groups, request.tables, strict=True)
        ]
        if sum(missing) > self._pool.free_blocks:
            return None
        request.held_blocks += sum(missing)
        return tuple(
            self._extend(table, total, count) for table, count in zip(request.tables, missing, strict=True)
        )

    def states_made(self, request: Request, end: int) -> list[StateMade]:
        """Index and return the states that a step up to token `end` completes; none if it ends inside a block.

        Call this method after the step's last prefix search, because an indexed block does not hold its state until the
        forward pass has run.
        """
        position, rest = divmod(end, self._block_tokens)
        if rest:
            return []
        made = [
            StateMade(
                request.request_id,
                group.index,
                position - 1,
                request.tables[group.index][position - 1],
                request.keys(group.index)[position - 1],
            )
            for group in self._groups
            if group.kind == "recurrent"
        ]
        for state in made:
            self._pool.index(state.block, state.key)
        return made

    def index_confirmed(self, request: Request) -> None:
        """Index the request's full blocks with confirmed tokens by their keys."""
        full = request.confirmed_tokens // self._block_tokens
        for group, table in enumerate(request.tables):
            keys = request.keys(group)
            for position in range(request.indexed_blocks, full):
                if table[position] != NULL_BLOCK:
                    self._pool.index(table[position], keys[position])
        request.indexed_blocks = max(request.indexed_blocks, full)

    def release(self, request: Request) -> None:
        """Release all of the request's blocks, deepest first, so that a prefix is evicted from its tail."""
        depths = zip(*map(reversed, request.tables), strict=True)
        self._pool.release(block for depth in depths for block in depth if block != NULL_BLOCK)
        request.forget_blocks()

    def _admission_table(self, group: GroupFacts, hit: PrefixHit, seen: int, end: int) -> list[int | None]:
        """Return a group's table at admission, with None wherever a new block is needed."""
        if group.kind == "recurrent":
            return self._states_table(hit.tables[group.index], seen, end)
        first = first_needed_block(group, seen)
        total = -(-end // self._block_tokens)
        found = hit.tables[group.index][first:]
        nulls = min(first, total)
        return [*[NULL_BLOCK] * nulls, *found, *[None] * (total - nulls - len(found))]

    def _states_table(self, found: Sequence[int], seen: int, end: int) -> list[int | None]:
        """Return a recurrent group's table at admission: the state after `seen`, and the state that the step writes."""
        read, written = seen // self._block_tokens - 1, (end - 1) // self._block_tokens
        table: list[int | None] = [NULL_BLOCK] * (written + 1)
        table[written] = None
        if read >= 0:
            table[read] = found[read] if read < len(found) else None
        return table

    def _missing(self, group: GroupFacts, positions: int, confirmed: int) -> int:
        """Return how many new blocks a table needs to grow by `positions`.

        A recurrent group keeps writing to its block until the block is complete.
        """
        if group.kind != "recurrent":
            return positions
        return int(confirmed % self._block_tokens == 0)

    def _extend(self, table: list[int], total: int, count: int) -> tuple[tuple[int, int], ...]:
        """Extend a table to `total` positions, with `count` new blocks at its end.

        Return the new blocks' positions and ids.

        Without new blocks, the table's last block moves to the new end.
        """
        start = len(table)
        if count == 0 and total > start:
            table += [NULL_BLOCK] * (total - start)
            table[start - 1], table[-1] = NULL_BLOCK, table[start - 1]
            return ()
        table += [NULL_BLOCK] * (total - start - count)
        start = len(table)
        table += self._pool.allocate(count)
        return tuple(enumerate(table[start:], start))

    def _recycle(self, request: Request) -> None:
        for group, table in zip(self._groups, request.tables, strict=True):
            first = min(first_needed_block(group, request.confirmed_tokens), len(table))
            gone = [p for p in range(request.recycled_blocks[group.index], first) if table[p] != NULL_BLOCK]
            self._pool.release(table[position] for position in reversed(gone))
            for position in gone:
                table[position] = NULL_BLOCK
            request.held_blocks -= len(gone)
            request.recycled_blocks[group.index] = max(first, request.recycled_blocks[group.index])


def find_prefix(
    pool: BlockPool, groups: Sequence[GroupFacts], keys: Sequence[Sequence[bytes]], max_blocks: int
) -> PrefixHit:
    """Return the longest hit of at most `max_blocks` blocks.

    The caller must hold the hit's blocks before allocating other blocks.

    Each group shortens the prefix until all groups agree. Full-attention groups are searched first and only once,
    because every prefix of their hit is also a hit. Their result limits the search in the other groups.
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
    """Return the largest length up to `blocks` at which the group has every block that the next token sees."""
    start, position = blocks, blocks  # All blocks in [position, start) were found.
    while position > first_needed_block(group, start * group.block_tokens):
        position -= 1
        if find(position) is None:
            start = position  # Every longer prefix needs the missing block.
    return start


def _table(group: GroupFacts, find: FindBlock, blocks: int) -> tuple[int, ...]:
    first = first_needed_block(group, blocks * group.block_tokens)
    return (NULL_BLOCK,) * first + tuple(find(position) or NULL_BLOCK for position in range(first, blocks))


def _finder(pool: BlockPool, keys: Sequence[bytes]) -> FindBlock:
    return lambda position: pool.cached_block(keys[position])
