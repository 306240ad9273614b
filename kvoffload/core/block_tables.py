"""Requests' block tables, without stale entries (R7).

In a window group the engine frees a block once the window has moved past it, and may allocate it to another request. If
the first request's table still named the block, the other request's KV would be stored under the first request's key.
So a reverse index maps each block of such a group to the table entries that name it, and when the engine allocates a
block, these entries are zeroed. The cost grows with the number of allocated blocks, not with requests times blocks.

A recurrent group keeps one or two blocks per request, and some engines move these blocks within the table in place. So
the table of a recurrent group contains only the states that the engine handed off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvoffload.core.request import RequestRecord
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId

TableEntry = tuple[list[DeviceBlockId], int]
"""The table of a request in one group, and a position in it."""


class BlockTables:
    """Keeps requests' block tables and the reverse index. The only writer of `RequestRecord.table`."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        recurrent = AttentionKind.RECURRENT
        self._recycling = [number for number, group in enumerate(groups) if group.recycles_blocks]
        self._windows = [number for number in self._recycling if groups[number].kind is not recurrent]
        self._attention = [number for number, group in enumerate(groups) if group.kind is not recurrent]
        self.entries: dict[DeviceBlockId, TableEntry] = {}
        """Maps each block of a block-recycling group to the table entry that names it, if exactly one entry does."""
        self.shared: dict[DeviceBlockId, list[TableEntry]] = {}
        """Maps each block that several entries name to these entries. A block is never in both dicts."""

    def reallocated(self, blocks: Sequence[DeviceBlockId]) -> int:
        """Zero newly allocated blocks in every table that names them. Return the number of zeroed entries."""
        entries, shared = self.entries, self.shared
        if entries.keys().isdisjoint(blocks) and shared.keys().isdisjoint(blocks):
            return 0
        stale = [entries.pop(block) for block in entries.keys() & blocks]
        for block in shared.keys() & blocks:
            stale += shared.pop(block)
        for row, position in stale:
            row[position] = NULL_BLOCK
        return len(stale)

    def allocated(self, record: RequestRecord, tables: Sequence[Sequence[DeviceBlockId]]) -> None:
        """Set a request's table to the blocks that the engine allocated. Call `reallocated` first."""
        if record.table is not None and (self.entries or self.shared):
            self.forget(record)
        if not self._recycling:
            record.table = list(map(list, tables))
            return
        record.table = [[] for _ in tables]
        self.extended(record, tables)

    def extended(self, record: RequestRecord, new_blocks: Sequence[Sequence[DeviceBlockId]]) -> None:
        """Append the blocks that the engine added to a request's table. Call `reallocated` first."""
        table = record.table
        assert table is not None, record
        if self._windows:
            named: dict[DeviceBlockId, TableEntry] = {}
            for group in self._windows:
                row = table[group]
                for position, block in enumerate(new_blocks[group], len(row)):
                    named[block] = row, position
            self._name(named)
        for group in self._attention:
            table[group] += new_blocks[group]

    def put(self, record: RequestRecord, group: int, position: int, block: DeviceBlockId) -> None:
        """Write the block of a handed-off recurrent state to its request's table. Call `reallocated` first."""
        assert record.table is not None, record
        row = record.table[group]
        row += [NULL_BLOCK] * (position + 1 - len(row))
        if row[position] != NULL_BLOCK:
            self._drop(row, position)
        row[position] = block
        self._name({block: (row, position)})

    def forget(self, record: RequestRecord) -> None:
        """Remove a request's table after the engine has freed the request's blocks."""
        table, record.table = record.table, None
        if table is None or not (self.entries or self.shared):
            return
        rows = [table[group] for group in self._recycling]
        if not self.shared:  # Each of the record's blocks has a single table entry.
            entries = self.entries
            for block in chain.from_iterable(rows):
                entries.pop(block, None)
            return
        for row in rows:
            for position, block in enumerate(row):
                if block != NULL_BLOCK:
                    self._drop(row, position)

    def _name(self, named: dict[DeviceBlockId, TableEntry]) -> None:
        """Add entries to the reverse index, ignoring the null block."""
        named.pop(NULL_BLOCK, None)
        if not self.shared and self.entries.keys().isdisjoint(named):
            self.entries.update(named)
            return
        for block, entry in named.items():
            if block in self.shared:
                self.shared[block].append(entry)
            elif block in self.entries:
                self.shared[block] = [self.entries.pop(block), entry]
            else:
                self.entries[block] = entry

    def _drop(self, row: list[DeviceBlockId], position: int) -> None:
        """Remove the entry at a position of a table from the reverse index."""
        block = row[position]
        named = self.shared.get(block)
        if named is None:
            self.entries.pop(block, None)
            return
        named[:] = [entry for entry in named if entry[0] is not row or entry[1] != position]
        if not named:
            del self.shared[block]
