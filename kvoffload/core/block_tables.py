"""Block tables, and the positions in them that went stale (R7).

In a window group the engine frees a block when the window has moved on, and allocates it again. A table that still names the
block would store another request's KV under this request's key. So a reverse index lists every block of such a group, and the
entries of newly allocated ids are zeroed in all tables. The cost grows with those ids, not with all requests times all blocks.

Recurrent groups keep one or two blocks per request, and some engines move these within the table in place. So a table has
only the states that were handed off, at their positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, repeat

from kvoffload.core.request import RequestRecord
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId

TableEntry = tuple[RequestRecord, int, int]
"""A request, a group's number and a position in its table."""


class BlockTables:
    """The only writer of `RequestRecord.table`, and of the reverse index."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._recycles = [group.recycles_blocks for group in groups]
        self._recurrent = [group.kind is AttentionKind.RECURRENT for group in groups]
        self.entries: dict[DeviceBlockId, TableEntry] = {}
        """For each block of a group that recycles blocks: the one entry that names it."""
        self.shared: dict[DeviceBlockId, set[TableEntry]] = {}
        """The entries of blocks that several entries name. A block is in one of these two dicts."""

    def reallocated(self, blocks: Iterable[DeviceBlockId]) -> int:
        """Zero these newly allocated ids in every table that names them; return how many entries were zeroed."""
        blocks = set(blocks)
        stale = [self.entries.pop(block) for block in self.entries.keys() & blocks]
        for block in self.shared.keys() & blocks:
            stale += self.shared.pop(block)
        for record, group, position in stale:
            assert record.table is not None, record
            record.table[group][position] = NULL_BLOCK
        return len(stale)

    def allocated(self, record: RequestRecord, tables: Sequence[Sequence[DeviceBlockId]]) -> None:
        """Replace a request's table by the one that the engine gave it. Call `reallocated` first."""
        if record.table is not None and (self.entries or self.shared):
            self.forget(record)
        if not any(self._recycles):
            record.table = list(map(list, tables))
            return
        record.table = [[] for _ in tables]
        self.extended(record, tables)

    def extended(self, record: RequestRecord, new_blocks: Sequence[Sequence[DeviceBlockId]]) -> None:
        """Append the blocks that the engine added to a request's table. Call `reallocated` first."""
        assert record.table is not None, record
        named = dict[DeviceBlockId, TableEntry]()
        for group, (row, more) in enumerate(zip(record.table, new_blocks, strict=False)):
            if self._recycles[group] and not self._recurrent[group]:
                named.update(zip(more, zip(repeat(record), repeat(group), count(len(row))), strict=False))
            if not self._recurrent[group]:
                row += more
        if named:
            self._name(named)

    def put(self, record: RequestRecord, group: int, position: int, block: DeviceBlockId) -> None:
        """Note the block of a state that the engine handed off. Call `reallocated` first."""
        assert record.table is not None, record
        row = record.table[group]
        row += [NULL_BLOCK] * (position + 1 - len(row))
        if row[position] != NULL_BLOCK:
            self._drop((record, group, position), row[position])
        row[position] = block
        self._name({block: (record, group, position)})

    def forget(self, record: RequestRecord) -> None:
        """Forget the table of a request whose blocks the engine has freed."""
        table, record.table = record.table, None
        if table is None or not (self.entries or self.shared):
            return
        recycling = [(group, row) for group, row in enumerate(table) if self._recycles[group]]
        if not self.shared:  # then the only entry of each block is this record's
            entries = self.entries
            for block in [block for _, row in recycling for block in row if block != NULL_BLOCK]:
                entries.pop(block, None)
            return
        for group, row in recycling:
            for position, block in enumerate(row):
                if block != NULL_BLOCK:
                    self._drop((record, group, position), block)

    def _name(self, named: dict[DeviceBlockId, TableEntry]) -> None:
        """Index these entries by their blocks, without the null block."""
        named.pop(NULL_BLOCK, None)
        if not self.shared and self.entries.keys().isdisjoint(named):
            self.entries.update(named)
            return
        for block, entry in named.items():
            if block in self.shared:
                self.shared[block].add(entry)
            elif block in self.entries:
                self.shared[block] = {self.entries.pop(block), entry}
            else:
                self.entries[block] = entry

    def _drop(self, entry: TableEntry, block: DeviceBlockId) -> None:
        named = self.shared.get(block)
        if named is None:
            self.entries.pop(block, None)
            return
        named.discard(entry)
        if not named:
            del self.shared[block]
