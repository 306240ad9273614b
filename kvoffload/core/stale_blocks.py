"""Block tables of running requests, and the positions in them that went stale (R7).

In a window group the engine takes a block back when the window has moved on, and hands it out again. A record that
still names it would store another request's KV under this one's key. So every block of such a group has an entry in a
reverse index, and ids that are handed out are struck from every record that holds them: at the cost of those ids, not
of all requests times all blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId, RequestId

Place = tuple[RequestId, int, int]
"""Request, group number, position in the table."""


class StaleBlocks:
    """The only writer of block tables."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._recycles = tuple(group.recycles_blocks for group in groups)
        self._tables: dict[RequestId, tuple[list[DeviceBlockId], ...]] = {}
        self._places: dict[DeviceBlockId, set[Place]] = {}

    def table(self, request: RequestId) -> tuple[list[DeviceBlockId], ...] | None:
        """Return a request's table, per group the block at each position; None without one. Read it, never write."""
        return self._tables.get(request)

    def handed_out(self, blocks: Collection[DeviceBlockId]) -> int:
        """The engine handed these ids out again: zero them where they are recorded; return how many positions."""
        if not self._places:
            return 0
        zeroed = 0
        for block in self._places.keys() & blocks:
            for request, group, position in self._places.pop(block):
                self._tables[request][group][position] = NULL_BLOCK
                zeroed += 1
        return zeroed

    def allocated(self, request: RequestId, tables: Sequence[Sequence[DeviceBlockId]]) -> None:
        """The engine gave a request a new table; it replaces any other. New ids were told as handed out before."""
        self.forget(request)
        self._tables[request] = tuple([] for _ in self._recycles)
        self.appended(request, tables)

    def appended(self, request: RequestId, new_blocks: Sequence[Sequence[DeviceBlockId]]) -> None:
        """The engine continued a request's table. New ids were told as handed out before."""
        table = self._tables[request]
        for group, blocks in enumerate(new_blocks):
            if self._recycles[group]:
                for position, block in enumerate(blocks, len(table[group])):
                    if block != NULL_BLOCK:
                        self._places.setdefault(block, set()).add((request, group, position))
            table[group].extend(blocks)

    def forget(self, request: RequestId) -> None:
        """The request gave its table up."""
        for group, blocks in enumerate(self._tables.pop(request, ())):
            if self._recycles[group]:
                for position, block in enumerate(blocks):
                    if block != NULL_BLOCK:
                        self._forget_place(block, (request, group, position))

    def problems(self) -> list[str]:
        """Return where the reverse index and the tables disagree. Reads only."""
        expected = {
            (block, (request, group, position))
            for request, table in self._tables.items()
            for group, blocks in enumerate(table)
            if self._recycles[group]
            for position, block in enumerate(blocks)
            if block != NULL_BLOCK
        }
        found = {(block, place) for block, places in self._places.items() for place in places}
        return [f"block {block} at {place}: index and table disagree" for block, place in expected ^ found]

    def _forget_place(self, block: DeviceBlockId, place: Place) -> None:
        places = self._places[block]
        places.discard(place)
        if not places:
            del self._places[block]
