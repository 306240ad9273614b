"""The table of host slots: which block each slot holds, in memory that the next process finds.

    | header: magic, format, generation, reset, slots, boot, fingerprint, ids of the ranks' files, checksum |
    | number of changes | ring: the slots that changed last                                               |
    | sequence of each slot | time of each slot's last use | record of each slot: check, length, key      |

A slot's sequence number is odd while a copy may write the slot, and even otherwise. It grows with every change, and of
two slots, the one that was published later has the larger one. So a slot is *invalidated* before a plan lets workers write to it, and *published* when every rank has written it: first the
record, then the number. A record counts only if its number is even, if it has a key, and if its check fits key, slot
and generation. A closed table has another magic: after a reset, nothing in it counts any more. Nor does a table count
that was begun before the last reset of any engine of its kind (`kvoffload.node.resets`).

A new process reads the table of the process before (`read_table`) and writes a new one with what it adopts
(`HostTable.create`), which replaces the old one by its name. Other engines follow the table while it is written
(`kvoffload.node.neighbour`).
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvoffload.disk.open_folder import FINGERPRINT_BYTES, OpenFolder
from kvoffload.disk.system import round_up
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.node.resets import NO_RESET

if TYPE_CHECKING:
    from numpy.typing import NDArray

TABLE_NAME, _NEW = "table", "table.new"
ID_BYTES = 16
RING = 4096
"""How many of the last changed slots the table names."""
_MAGIC, _CLOSED, _VERSION = b"KVOHOSTS", b"KVCLOSED", 2
_BOOT_BYTES = 36
# magic, version, number of ranks, generation, reset, slots, boot id, fingerprint; then the ids of the ranks' files
_HEADER = struct.Struct(f"<8sII8s8sQ{_BOOT_BYTES}s{FINGERPRINT_BYTES}s")
_SUM = struct.Struct("<Q")
_KEY_BYTES = 71
_RECORD = struct.Struct(f"<QB{_KEY_BYTES}s")
RECORD_BYTES = _RECORD.size
_NUMBER_BYTES = 8
_RING_NUMBER_BYTES = 4


class NotATable(Exception):
    """Raised when an earlier process's table names no blocks that count.

    Args:
        reason: why, as the message says.
        unsettled: slots that a copy of the earlier process may still write.
        was_closed: whether the earlier process closed the table.
    """

    def __init__(self, reason: str, unsettled: Sequence[SlotId] = (), *, was_closed: bool = False) -> None:
        super().__init__(reason)
        self.unsettled = unsettled
        self.was_closed = was_closed


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What a table is about.

    Args:
        slots: the number of slots.
        files: the ids of the ranks' files, in the order of the ranks.
        fingerprint: the fingerprint of the KV; empty until it is known.
        generation: random bytes of this table.
        reset: names the last reset before the table was begun; see `kvoffload.node.resets`.
    """

    slots: int
    files: tuple[bytes, ...]
    fingerprint: str = ""
    generation: bytes = b""
    reset: bytes = NO_RESET


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier process left in its table.

    Args:
        header: the table's header.
        slots: slots with a block, the least recently used first.
        keys: the blocks' keys.
        used_at: when each block was last used, in seconds of the machine's monotonic clock.
        unsettled: slots that a copy of the earlier process may still write.
    """

    header: TableHeader
    slots: list[SlotId]
    keys: list[BlockKey]
    used_at: list[float]
    unsettled: list[SlotId]


class HostTable:
    """This process's table, created with `create`. One thread writes slots; others may write the header and times of use."""

    def __init__(self, header: TableHeader, memory: mmap.mmap) -> None:
        self.header = header
        self._memory = memory
        places = places_of(header)
        view = memoryview(memory)
        self._numbers = view[places.numbers : places.used_at].cast("Q")
        self._used_at = np.frombuffer(memory, np.float64, header.slots, places.used_at)
        self._records = places.records
        self._last = 0  # the largest sequence number so far
        self._changes = view[places.changes : places.changes + _NUMBER_BYTES].cast("Q")
        self._ring = view[places.ring : places.numbers].cast("I")

    @classmethod
    def create(cls, folder: OpenFolder, header: TableHeader, left: Left | None = None) -> HostTable:
        """Write the folder's new table, with what `left` lists, in place of the old one.

        Args:
            folder: the locked folder.
            header: the header; its generation is drawn here.
            left: what this process adopts; None for nothing.

        Raises:
            OSError: the file cannot be written.
        """
        header = replace(header, generation=secrets.token_bytes(8))
        descriptor = folder.make_file(_NEW)
        try:
            os.posix_fallocate(descriptor, 0, places_of(header).end)
            memory = mmap.mmap(descriptor, places_of(header).end)
        finally:
            os.close(descriptor)
        table = cls(header, memory)
        if left is not None:
            for slot, key, used_at in reversed([*zip(left.slots, left.keys, left.used_at, strict=True)]):
                table.publish(slot, key, used_at)
            for slot in left.unsettled:
                table.invalidate(slot)
        packed = _packed(table.header)
        memory[: len(packed)] = packed
        folder.rename(_NEW, TABLE_NAME)
        return table

    def identify(self, fingerprint: str) -> None:
        """Record the KV's fingerprint. Without one, no later process counts the table. A closed table stays closed."""
        self.header = replace(self.header, fingerprint=fingerprint)
        packed, magic = _packed(self.header), len(_MAGIC)
        # The magic stays as it is, because another thread may have closed the table meanwhile.
        self._memory[magic : len(packed)] = packed[magic:]

    def invalidate(self, slot: SlotId) -> None:
        """Record that copies may write a slot from now on, so that its bytes are of no block."""
        self._numbers[slot] |= 1
        self._changed(slot)

    def free(self, slot: SlotId) -> None:
        """Record that no copy writes a slot any more, which has no block."""
        self._numbers[slot] |= 1
        _RECORD.pack_into(self._memory, self._records + slot * _RECORD.size, 0, 0, b"")
        self._last = self._numbers[slot] = self._last + 2
        self._changed(slot)

    def publish(self, slot: SlotId, key: BlockKey, used_at: float) -> None:
        """Record a slot's block, which every rank has written. Publish parents before their children.

        Raises:
            ValueError: the key is too long for a record.
        """
        if len(key) > _KEY_BYTES:
            raise ValueError(f"a block's key has {len(key)} bytes, a record has {_KEY_BYTES}")
        self._numbers[slot] |= 1
        self._used_at[slot] = used_at
        check = _check(key, slot, self.header.generation)
        _RECORD.pack_into(self._memory, self._records + slot * _RECORD.size, check, len(key), key)
        self._last = self._numbers[slot] = self._last + 2
        self._changed(slot)

    def _changed(self, slot: SlotId) -> None:
        """Let engines that follow the table find a slot, which has its new number already."""
        changes = self._changes[0]
        self._ring[changes % RING] = slot
        self._changes[0] = changes + 1

    def use(self, first: int, used_at: NDArray[np.float64]) -> None:
        """Record when slots from `first` on were last used. Earlier times than the recorded ones change nothing."""
        known = self._used_at[first : first + len(used_at)]
        np.maximum(known, used_at[: len(known)], out=known)

    def close(self) -> None:
        """Let no later process count the table."""
        self._memory[: len(_CLOSED)] = _CLOSED


def read_table(folder: OpenFolder, files: tuple[bytes, ...], reset: bytes = NO_RESET) -> Left | None:
    """Return what the process before left in the folder's table; None without a table.

    Args:
        folder: the locked folder.
        files: the ids that the ranks' files had before this process opened them.
        reset: names the last reset of an engine of this kind.

    Raises:
        NotATable: the table is closed or damaged, or about other files.
        OSError: the file cannot be read.
    """
    try:
        with os.fdopen(folder.open(TABLE_NAME, os.O_RDONLY), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    header, was_closed = read_header(data)
    places = places_of(header)
    if len(data) < places.end:
        raise NotATable(f"its {len(data)} bytes end before the last of {header.slots} slots")
    sequence = np.frombuffer(data, np.uint64, header.slots, places.numbers)
    is_unsettled = sequence & np.uint64(1) == 1
    unsettled: list[SlotId] = np.flatnonzero(is_unsettled).tolist()  # type: ignore[assignment]  # numbers of slots
    if was_closed:
        raise NotATable("the engine before was reset, or its state was in doubt", unsettled, was_closed=True)
    if header.reset != reset:
        raise NotATable("an engine that shares this memory was reset", unsettled, was_closed=True)
    if header.files != files:
        raise NotATable("it is about other files of the ranks", unsettled)
    used_at = np.frombuffer(data, np.float64, header.slots, places.used_at)
    slots, keys = _blocks(
        data, places.records, np.flatnonzero(~is_unsettled & (sequence > 0)).tolist(), header
    )
    found = np.array(slots, np.int64)
    # Among blocks used at once, the parents were published first, and must be evicted last (R15).
    order = np.lexsort((-sequence[found].astype(np.int64), used_at[found])) if slots else found
    return Left(
        header,
        found[order].tolist(),
        [keys[place] for place in order.tolist()],
        used_at[found][order].tolist(),
        unsettled,
    )


def remove_table(folder: OpenFolder) -> None:
    folder.unlink(TABLE_NAME)


def table_bytes(slots: int, ranks: int) -> int:
    """Return how many bytes a table takes."""
    return places_of(TableHeader(slots, (b"",) * ranks)).end


def boot_id() -> str:
    """Return the id of the machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _blocks(
    data: bytes, start: int, slots: Iterable[int], header: TableHeader
) -> tuple[list[SlotId], list[BlockKey]]:
    found, keys = list[SlotId](), list[BlockKey]()
    for slot in slots:
        key = key_at(data, start + slot * RECORD_BYTES, slot, header.generation)
        if key is not None:
            found.append(SlotId(slot))
            keys.append(key)
    return found, keys


def key_at(data: bytes, start: int, slot: int, generation: bytes) -> BlockKey | None:
    """Return the key in a slot's record; None if there is none, or if the record is damaged."""
    check, length, padded = _RECORD.unpack_from(data, start)
    key = BlockKey(padded[:length])
    return key if length and check == _check(key, slot, generation) else None


def _check(key: BlockKey, slot: int, generation: bytes) -> int:
    return xxh3_64_intdigest(b"%b%d %b" % (generation, slot, key))


def _packed(header: TableHeader) -> bytes:
    packed = _HEADER.pack(
        _MAGIC,
        _VERSION,
        len(header.files),
        header.generation,
        header.reset,
        header.slots,
        boot_id().encode(),
        header.fingerprint.encode(),
    ) + b"".join(header.files)
    return packed + _SUM.pack(xxh3_64_intdigest(packed))


def read_header(data: bytes) -> tuple[TableHeader, bool]:
    """Return a table's header, and whether the table was closed.

    Args:
        data: the beginning of the table, up to the number of changes or longer.

    Raises:
        NotATable: there is no header, or it is damaged.
    """
    if len(data) < _HEADER.size:
        raise NotATable(f"it has {len(data)} bytes")
    magic, version, ranks, generation, reset, slots, boot, fingerprint = _HEADER.unpack_from(data)
    if magic not in (_MAGIC, _CLOSED) or version != _VERSION:
        raise NotATable(
            f"it begins with {magic!r} in version {version}, not with {_MAGIC!r} in version {_VERSION}"
        )
    ids = data[_HEADER.size : _HEADER.size + ranks * ID_BYTES]
    files = tuple([ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES)])
    header = TableHeader(
        slots, files, fingerprint.rstrip(b"\0").decode("ascii", "replace"), generation, reset
    )
    packed = _MAGIC + data[len(_MAGIC) : _HEADER.size] + ids
    if data[len(packed) : len(packed) + _SUM.size] != _SUM.pack(xxh3_64_intdigest(packed)):
        raise NotATable("its header is damaged")
    if boot != boot_id().encode():
        raise NotATable("it is from before the machine started")
    return header, magic == _CLOSED


class Places(NamedTuple):
    """Where the parts of a table begin; the number of changes ends the header."""

    changes: int
    ring: int
    numbers: int
    used_at: int
    records: int
    end: int


def places_of(header: TableHeader) -> Places:
    """Return where the parts of a table begin. The ring has `RING` numbers of slots, in the order of the changes."""
    changes = -(-(_HEADER.size + len(header.files) * ID_BYTES + _SUM.size) // _NUMBER_BYTES) * _NUMBER_BYTES
    ring = round_up(changes + _NUMBER_BYTES)
    numbers = ring + RING * _RING_NUMBER_BYTES
    size = round_up(header.slots * _NUMBER_BYTES)
    records = numbers + 2 * size
    return Places(changes, ring, numbers, numbers + size, records, records + header.slots * _RECORD.size)
