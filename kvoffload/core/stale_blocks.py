"""Block tables, and the positions in them that went stale (R7).

In a window group the engine takes a block back when the window has moved on, and hands it out again. A table that still
names the block would store another request's KV under this request's key. So every block of such a group has an entry in
a reverse index, and ids that are handed out are zeroed in every table that names them. That costs the number of those
ids, not the number of all requests times all blocks.

Recurrent groups keep one or two blocks a request, and some engines move these within the table in place. So a table has
only the states that were handed off, at their positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.core.request import RequestRecord
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId

Place = tuple[RequestRecord, int, int]
"""A request, a group's number and a position in its table."""


class StaleBlocks:
    """The only writer of `RequestRecord.table`, and of the reverse index."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._recycling = tuple(number for number, group in enumerate(groups) if group.recycles_blocks)
        self._recurrent = {
            number for number, group in enumerate(groups) if group.kind is AttentionKind.RECURRENT
        }
        self.places: dict[DeviceBlockId, set[Place]] = {}
        """Per block of a group that recycles blocks: where tables name it."""

    def handed_out(self, blocks: Iterable[DeviceBlockId]) -> int:
        """The engine handed these ids out: zero them wherever a table names them; return how many positions."""
        zeroed = 0
        for block in self.places.keys() & blocks:
            for record, group, position in self.places.pop(block):
                assert record.table is not None, record
                record.table[group][position] = NULL_BLOCK
                zeroed += 1
        return zeroed

    def allocated(self, record: RequestRecord, tables: Sequence[Sequence[DeviceBlockId]]) -> None:
        """The engine gave a request a new table, which replaces any other. Call `handed_out` first."""
        if self._recycling and record.table is not None:
            self.forget(record)
        record.table = [[] if group in self._recurrent else list(row) for group, row in enumerate(tables)]
        for group in self._recycling:
            self._note(record, group, 0)

    def extended(self, record: RequestRecord, new_blocks: Sequence[Sequence[DeviceBlockId]]) -> None:
        """The engine continued a request's table. Call `handed_out` first."""
        table = record.table
        assert table is not None, record
        for group, more in enumerate(new_blocks):
            if not more or group in self._recurrent:
                continue
            end = len(table[group])
            table[group] += more
            if group in self._recycling:
                self._note(record, group, end)

    def put(self, record: RequestRecord, group: int, position: int, block: DeviceBlockId) -> None:
        """The engine handed off a state that lies in this block. Call `handed_out` first."""
        assert record.table is not None, record
        row = record.table[group]
        row += [NULL_BLOCK] * (position + 1 - len(row))
        self._drop((record, group, position), row[position])
        row[position] = block
        self.places.setdefault(block, set()).add((record, group, position))

    def forget(self, record: RequestRecord) -> None:
        """The engine took a request's table back."""
        table, record.table = record.table, None
        if table is None:
            return
        for group in self._recycling:
            for position, block in enumerate(table[group]):
                self._drop((record, group, position), block)

    def problems(self, records: Iterable[RequestRecord]) -> list[str]:
        """Return where the reverse index and the tables disagree. Reads only."""
        expected = {
            (block, (record, group, position))
            for record in records
            if record.table is not None
            for group in self._recycling
            for position, block in enumerate(record.table[group])
            if block != NULL_BLOCK
        }
        found = {(block, place) for block, named in self.places.items() for place in named}
        return [
            f"block {block} at {record.request}, group {group}, position {position}: index and table disagree"
            for block, (record, group, position) in expected ^ found
        ]

    def _drop(self, place: Place, block: DeviceBlockId) -> None:
        if block == NULL_BLOCK:
            return
        named = self.places[block]
        named.discard(place)
        if not named:
            del self.places[block]

    def _note(self, record: RequestRecord, group: int, first: int) -> None:
        assert record.table is not None, record
        places, blocks = self.places, record.table[group]
        for position in range(first, len(blocks)):
            if blocks[position] != NULL_BLOCK:
                places.setdefault(blocks[position], set()).add((record, group, position))
