"""The table of host slots: which block each slot holds, in memory that the next process finds.

    | header: magic, format, generation, slots, boot, fingerprint, ids of the ranks' files, checksum |
    | sequence of each slot | time of each slot's last use | record of each slot: check, length, key  |

A slot's sequence number is odd while a copy may write the slot, and even otherwise. It grows with every change, and of
two slots, the one that was published later has the larger one. So a slot is *invalidated* before a plan lets workers write to it, and *published* when every rank has written it: first the
record, then the number. A record counts only if its number is even, if it has a key, and if its check fits key, slot
and generation. A closed table has another magic: after a reset, nothing in it counts any more.

A new process reads the table of the process before (`read_table`) and writes a new one with what it adopts
(`HostTable.create`), which replaces the old one by its name.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from kvoffload.disk.open_folder import FINGERPRINT_BYTES, OpenFolder
from kvoffload.disk.system import round_up
from kvoffload.model.ids import BlockKey, SlotId

if TYPE_CHECKING:
    from numpy.typing import NDArray

TABLE_NAME, _NEW = "table", "table.new"
ID_BYTES = 16
_MAGIC, _CLOSED, _VERSION = b"KVOHOSTS", b"KVCLOSED", 1
_BOOT_BYTES = 36
# magic, version, number of ranks, generation, slots, boot id, fingerprint; then the ids of the ranks' files
_HEADER = struct.Struct(f"<8sII8sQ{_BOOT_BYTES}s{FINGERPRINT_BYTES}s")
_SUM = struct.Struct("<Q")
_KEY_BYTES = 71
_RECORD = struct.Struct(f"<QB{_KEY_BYTES}s")
_NUMBER_BYTES = 8


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
    """

    slots: int
    files: tuple[bytes, ...]
    fingerprint: str = ""
    generation: bytes = b""


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
        first, numbers = _places(header)
        view = memoryview(memory)
        self._numbers = view[first : first + numbers].cast("Q")
        self._used_at = np.frombuffer(memory, np.float64, header.slots, first + numbers)
        self._records = first + 2 * numbers
        self._last = 0  # the largest sequence number so far

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
        header = TableHeader(header.slots, header.files, header.fingerprint, secrets.token_bytes(8))
        descriptor = folder.make_file(_NEW)
        try:
            os.posix_fallocate(descriptor, 0, _size(header))
            memory = mmap.mmap(descriptor, _size(header))
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
        self.header = TableHeader(self.header.slots, self.header.files, fingerprint, self.header.generation)
        packed, magic = _packed(self.header), len(_MAGIC)
        # The magic stays as it is, because another thread may have closed the table meanwhile.
        self._memory[magic : len(packed)] = packed[magic:]

    def invalidate(self, slot: SlotId) -> None:
        """Record that copies may write a slot from now on, so that its bytes are of no block."""
        self._numbers[slot] |= 1

    def free(self, slot: SlotId) -> None:
        """Record that no copy writes a slot any more, which has no block."""
        self._numbers[slot] |= 1
        _RECORD.pack_into(self._memory, self._records + slot * _RECORD.size, 0, 0, b"")
        self._last = self._numbers[slot] = self._last + 2

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

    def use(self, first: int, used_at: NDArray[np.float64]) -> None:
        """Record when slots from `first` on were last used. Earlier times than the recorded ones change nothing."""
        known = self._used_at[first : first + len(used_at)]
        np.maximum(known, used_at[: len(known)], out=known)

    def close(self) -> None:
        """Let no later process count the table."""
        self._memory[: len(_CLOSED)] = _CLOSED


def read_table(folder: OpenFolder, files: tuple[bytes, ...]) -> Left | None:
    """Return what the process before left in the folder's table; None without a table.

    Args:
        folder: the locked folder.
        files: the ids that the ranks' files had before this process opened them.

    Raises:
        NotATable: the table is closed or damaged, or about other files.
        OSError: the file cannot be read.
    """
    try:
        with os.fdopen(folder.open(TABLE_NAME, os.O_RDONLY), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    header, was_closed = _read_header(data)
    first, numbers = _places(header)
    if len(data) < _size(header):
        raise NotATable(f"its {len(data)} bytes end before the last of {header.slots} slots")
    sequence = np.frombuffer(data, np.uint64, header.slots, first)
    is_unsettled = sequence & np.uint64(1) == 1
    unsettled: list[SlotId] = np.flatnonzero(is_unsettled).tolist()  # type: ignore[assignment]  # numbers of slots
    if was_closed:
        raise NotATable("the engine before was reset, or its state was in doubt", unsettled, was_closed=True)
    if header.files != files:
        raise NotATable("it is about other files of the ranks", unsettled)
    used_at = np.frombuffer(data, np.float64, header.slots, first + numbers)
    slots, keys = _blocks(
        data, first + 2 * numbers, np.flatnonzero(~is_unsettled & (sequence > 0)).tolist(), header
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
    return _size(TableHeader(slots, (b"",) * ranks))


def boot_id() -> str:
    """Return the id of the machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _blocks(
    data: bytes, start: int, slots: Iterable[int], header: TableHeader
) -> tuple[list[SlotId], list[BlockKey]]:
    found, keys = list[SlotId](), list[BlockKey]()
    for slot in slots:
        check, length, padded = _RECORD.unpack_from(data, start + slot * _RECORD.size)
        key = BlockKey(padded[:length])
        if length and check == _check(key, slot, header.generation):
            found.append(SlotId(slot))
            keys.append(key)
    return found, keys


def _check(key: BlockKey, slot: int, generation: bytes) -> int:
    return xxh3_64_intdigest(b"%b%d %b" % (generation, slot, key))


def _packed(header: TableHeader) -> bytes:
    packed = _HEADER.pack(
        _MAGIC,
        _VERSION,
        len(header.files),
        header.generation,
        header.slots,
        boot_id().encode(),
        header.fingerprint.encode(),
    ) + b"".join(header.files)
    return packed + _SUM.pack(xxh3_64_intdigest(packed))


def _read_header(data: bytes) -> tuple[TableHeader, bool]:
    """Return a table's header, and whether the table was closed.

    Raises:
        NotATable: there is no header, or it is damaged.
    """
    if len(data) < _HEADER.size:
        raise NotATable(f"it has {len(data)} bytes")
    magic, version, ranks, generation, slots, boot, fingerprint = _HEADER.unpack_from(data)
    if magic not in (_MAGIC, _CLOSED) or version != _VERSION:
        raise NotATable(
            f"it begins with {magic!r} in version {version}, not with {_MAGIC!r} in version {_VERSION}"
        )
    ids = data[_HEADER.size : _HEADER.size + ranks * ID_BYTES]
    files = tuple([ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES)])
    header = TableHeader(slots, files, fingerprint.rstrip(b"\0").decode("ascii", "replace"), generation)
    packed = _MAGIC + data[len(_MAGIC) : _HEADER.size] + ids
    if data[len(packed) : len(packed) + _SUM.size] != _SUM.pack(xxh3_64_intdigest(packed)):
        raise NotATable("its header is damaged")
    if boot != boot_id().encode():
        raise NotATable("it is from before the machine started")
    return header, magic == _CLOSED


def _places(header: TableHeader) -> tuple[int, int]:
    """Return where the sequence numbers begin, and how many bytes they take."""
    return round_up(_HEADER.size + len(header.files) * ID_BYTES + _SUM.size), round_up(
        header.slots * _NUMBER_BYTES
    )


def _size(header: TableHeader) -> int:
    first, numbers = _places(header)
    return first + 2 * numbers + header.slots * _RECORD.size
