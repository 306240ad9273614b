"""Follows the table of another engine on this machine, which that engine writes.

The owner knows nothing of its readers, and no lock is shared. A reader takes a slot's number, then its record, and then
the number again: a record counts only between two equal, even numbers. A thread that copies a slot's bytes looks at the
number once more after the copy (`TableFile.have`). If it is still the one that the reader took, nothing has written the
slot in between. On processors that reorder reads, the system calls and the GIL between two looks keep their order.

Tables and files are read with `pread`, never mapped: a mapped file that shrinks kills its reader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.disk.open_folder import OpenFolder, open_folder
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import NodeSlot
from kvoffload.node.table import (
    RECORD_BYTES,
    RING,
    TABLE_NAME,
    NotATable,
    Places,
    TableHeader,
    key_at,
    places_of,
    read_header,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LONGEST_HEADER = 2**16
_AT_ONCE = 256
"""How many slots are read at once. The GIL is free between two reads, so hooks wait less than a millisecond."""
_FAR = 2**12
"""Numbers of slots that are this near to each other are read at once: copying 32 KiB takes as long as another call."""
_GAP = 16  # slots that are this near to each other are read together


def read_numbers(descriptor: int, start: int, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the numbers of some slots, in ascending order, from an array in a file that begins at `start`.

    Raises:
        ValueError: the file ends before the last of them.
    """
    cuts = np.flatnonzero(np.diff(slots) > _FAR) + 1
    parts: list[NDArray[np.uint64]] = []
    for some in np.split(slots, cuts):
        first, count = int(some[0]), int(some[-1] - some[0] + 1)
        data = os.pread(descriptor, 8 * count, start + 8 * first)
        parts.append(np.frombuffer(data, np.uint64, count)[some - first])
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class TableFile:
    """An open table of another engine.

    Args:
        descriptor: the open file.
        header: its header.
        places: where its parts begin.
    """

    descriptor: int
    header: TableHeader
    places: Places
    _head: bytes

    @classmethod
    def open(cls, folder: OpenFolder) -> TableFile:
        """Open the table in an engine's folder.

        Raises:
            NotATable: the table is closed or damaged.
            DiskError, OSError: it cannot be opened.
        """
        descriptor = folder.open(TABLE_NAME, os.O_RDONLY)
        try:
            data = os.pread(descriptor, _LONGEST_HEADER, 0)
            header, was_closed = read_header(data)
            places = places_of(header)
            if was_closed or os.fstat(descriptor).st_size < places.end:
                raise NotATable("it is closed or cut")
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, header, places, data[: places.changes])

    def changes(self) -> int | None:
        """Return how often a slot has changed so far; None if the table does not count any more.

        It is closed, replaced or removed, or its header has changed.
        """
        data = os.pread(self.descriptor, self.places.changes + 8, 0)
        if data[:-8] != self._head or not os.fstat(self.descriptor).st_nlink:
            return None
        return int.from_bytes(data[-8:], "little")

    def numbers(self, first: int, end: int) -> NDArray[np.uint64]:
        """Return the sequence numbers of some slots. After the end of a cut file, they are missing."""
        data = os.pread(self.descriptor, 8 * (end - first), self.places.numbers + 8 * first)
        return np.frombuffer(data[: len(data) - len(data) % 8], np.uint64)

    def have(self, targets: Sequence[NodeSlot]) -> list[bool]:
        """Return whether each slot, in ascending order, still has its sequence number."""
        try:
            found = read_numbers(
                self.descriptor, self.places.numbers, np.array([each.slot for each in targets])
            )
        except ValueError:
            return [False] * len(targets)
        return [number == each.number for number, each in zip(found.tolist(), targets, strict=True)]

    def close(self) -> None:
        os.close(self.descriptor)


class Neighbour:
    """What is known of another engine's table. One thread calls `follow`; any thread may look up keys.

    Args:
        table: the open table, which `close` closes.

    Attributes:
        parts: for each first byte of a key, the slots and sequence numbers by key. Several dicts, because a long one is
            sometimes rebuilt in a single call, for which hooks would wait.
    """

    def __init__(self, table: TableFile) -> None:
        self.table = table
        self.parts: list[dict[BlockKey, tuple[SlotId, int]]] = [{} for _ in range(256)]
        self._numbers = np.zeros(table.header.slots, np.uint64)
        self._keys: list[BlockKey | None] = [None] * table.header.slots
        self._seen: int | None = None  # how many changes have been read

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def follow(self) -> bool:
        """Read what has changed since the last call; return whether the table still counts."""
        changes = self.table.changes()
        if changes is None:
            return False
        if changes != self._seen:
            for slots in _runs(self._changed(changes)):
                self._read(slots.start, slots.stop)
            self._seen = changes
        return True

    def close(self) -> None:
        self.table.close()

    def _changed(self, changes: int) -> Iterable[int]:
        """Return the slots that have changed; all slots if the ring does not name all of them any more."""
        slots, seen = self.table.header.slots, self._seen
        if seen is None:
            return range(slots)
        ring = np.frombuffer(os.pread(self.table.descriptor, 4 * RING, self.table.places.ring), np.uint32)
        after = self.table.changes()
        if after is None or after - seen >= RING or len(ring) < RING:
            return range(slots)
        found = np.unique(ring[np.arange(seen, changes) % RING])
        return found[found < slots].tolist()  # type: ignore[no-any-return]  # a list of whole numbers

    def _read(self, first: int, end: int) -> None:
        """Read some slots. A slot that changes meanwhile has no block until it is read again."""
        table = self.table
        numbers = table.numbers(first, end)
        data = os.pread(
            table.descriptor, RECORD_BYTES * (end - first), table.places.records + RECORD_BYTES * first
        )
        after = table.numbers(first, end)
        if not len(numbers) == len(after) == len(data) // RECORD_BYTES == end - first:
            return  # The file was cut, and `have` will find no number in it.
        is_whole = (numbers == after) & (numbers & np.uint64(1) == 0)
        numbers = np.where(is_whole, numbers, np.uint64(0))
        for place in np.flatnonzero(numbers != self._numbers[first:end]).tolist():
            number, slot = int(numbers[place]), SlotId(first + place)
            key = key_at(data, place * RECORD_BYTES, slot, table.header.generation) if number else None
            self._note(slot, key, number)
        self._numbers[first:end] = numbers

    def _note(self, slot: SlotId, key: BlockKey | None, number: int) -> None:
        before = self._keys[slot]
        if before is not None and before != key:
            part = self.parts[before[0]]
            if part.get(before, (None,))[0] == slot:
                del part[before]
        self._keys[slot] = key
        if key is not None:
            self.parts[key[0]][key] = slot, number


def _runs(slots: Iterable[int]) -> Iterator[range]:
    """Yield ranges that cover these slots, which ascend."""
    first = last = -1
    for slot in slots:
        if first < 0:
            first = slot
        elif slot - last > _GAP or slot - first >= _AT_ONCE:
            yield range(first, last + 1)
            first = slot
        last = slot
    if first >= 0:
        yield range(first, last + 1)


def find_neighbours(kind: OpenFolder, known: Collection[str], fits: Fits) -> Iterator[tuple[str, Neighbour]]:
    """Yield the name and the table of each engine of this kind that is not known yet and that fits.

    Args:
        kind: the folder of the kind.
        known: names of engines' folders to skip.
        fits: returns whether the blocks of an engine, given its open folder and its table, are those of this engine.
    """
    for name in sorted(set(os.listdir(kind.descriptor)).difference(known)):
        if name.isascii() and name.isdigit():
            with suppress(NotATable, OSError, DiskError), open_folder(kind.path / name) as folder:
                table = TableFile.open(folder)
                is_found = False
                try:
                    is_found = fits(folder, table)
                finally:
                    if not is_found:
                        table.close()
                if is_found:
                    yield name, Neighbour(table)


Fits = Callable[[OpenFolder, TableFile], bool]
