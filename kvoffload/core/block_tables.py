"""Requests' block tables, without stale entries (R7).

In a window group the engine frees a block once the window has moved past it, and may allocate it to another request. If
the first request's table still named the block, the other request's KV would be stored under the first request's key.
So a reverse index maps each block of such a group to the table entries that name it, and when the engine allocates a
block, these entries are zeroed. The cost grows with the number of allocated blocks, not with requests times blocks.

A recurrent group keeps one or two blocks per request, and some engines move these blocks within the table in place. So
the table of a recurrent group contains only the states that the engine handed off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, repeat

from kvoffload.core.request import RequestRecord
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId

TableEntry = tuple[RequestRecord, int, int]
"""A request, a group's number, and a position in the request's table of that group."""


class BlockTables:
    """Keeps requests' block tables and the reverse index. The only writer of `RequestRecord.table`."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._recycles = [group.recycles_blocks for group in groups]
        self._some_recycle = any(self._recycles)
        self._recurrent = [group.kind is AttentionKind.RECURRENT for group in groups]
        self.entries: dict[DeviceBlockId, TableEntry] = {}
        """Maps each block of a block-recycling group to the table entry that names it, if exactly one entry does."""
        self.shared: dict[DeviceBlockId, set[TableEntry]] = {}
        """Maps each block that several entries name to these entries. A block is never in both dicts."""

    def reallocated(self, blocks: Iterable[DeviceBlockId]) -> int:
        """Zero newly allocated blocks in every table that names them. Return the number of zeroed entries."""
        blocks = set(blocks)
        stale = [self.entries.pop(block) for block in self.entries.keys() & blocks]
        for block in self.shared.keys() & blocks:
            stale += self.shared.pop(block)
        for record, group, position in stale:
            assert record.table is not None, record
            record.table[group][position] = NULL_BLOCK
        return len(stale)

    def allocated(self, record: RequestRecord, tables: Sequence[Sequence[DeviceBlockId]]) -> None:
        """Set a request's table to the blocks that the engine allocated. Call `reallocated` first."""
        if record.table is not None and (self.entries or self.shared):
            self.forget(record)
        if not self._some_recycle:
            record.table = list(map(list, tables))
            return
        record.table = [[] for _ in tables]
        self.extended(record, tables)

    def extended(self, record: RequestRecord, new_blocks: Sequence[Sequence[DeviceBlockId]]) -> None:
        """Append the blocks that the engine added to a request's table. Call `reallocated` first."""
        assert record.table is not None, record
        if not self._some_recycle:
            for row, more in zip(record.table, new_blocks, strict=False):
                row += more
            return
        named = dict[DeviceBlockId, TableEntry]()
        for group, (row, more) in enumerate(zip(record.table, new_blocks, strict=False)):
            if self._recycles[group] and not self._recurrent[group]:
                named.update(zip(more, zip(repeat(record), repeat(group), count(len(row))), strict=False))
            if not self._recurrent[group]:
                row += more
        if named:
            self._name(named)

    def put(self, record: RequestRecord, group: int, position: int, block: DeviceBlockId) -> None:
        """Write the block of a handed-off recurrent state to its request's table. Call `reallocated` first."""
        assert record.table is not None, record
        row = record.table[group]
        row += [NULL_BLOCK] * (position + 1 - len(row))
        if row[position] != NULL_BLOCK:
            self._drop((record, group, position), row[position])
        row[position] = block
        self._name({block: (record, group, position)})

    def forget(self, record: RequestRecord) -> None:
        """Remove a request's table after the engine has freed the request's blocks."""
        table, record.table = record.table, None
        if table is None or not (self.entries or self.shared):
            return
        recycling = [(group, row) for group, row in enumerate(table) if self._recycles[group]]
        if not self.shared:  # Each of the record's blocks has a single table entry.
            entries = self.entries
            for _, row in recycling:
                for block in row:
                    entries.pop(block, None)
            return
        for group, row in recycling:
            for position, block in enumerate(row):
                if block != NULL_BLOCK:
                    self._drop((record, group, position), block)

    def _name(self, named: dict[DeviceBlockId, TableEntry]) -> None:
        """Add entries to the reverse index, ignoring the null block."""
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
