"""The index of the slot files: which block each slot holds.

    header                             batch                                    record
    "KVOINDEX" version                 magic, bytes, number, checksum           slot, kind, key, a checksum a rank
    generation, ids of files    record, record, ...
    checksum

The index is a log of three events: a slot was filled with a block (put), invalidated, or read (use). The checksum of
a batch covers its number and the log's generation, so that a batch of an older log or in another place is not accepted.
With a key, the checksums of header, batches and ranks' shards are MACs, so that an index from another writer is not read.
Reading stops at the first incomplete batch. What is lost with it costs hits, never correctness: a slot whose invalidation is lost is
still indexed under its old block, but its bytes do not have that block's checksums.

All records have one size, so that numpy reads a million of them in a few calls.

The file is only appended to. Compacting it, a new generation and a change of the slot files write a new file beside it, which
is synced and renamed: the name always refers to one complete index. All of this may wait for the disk. One thread at a time
calls it, never an engine's.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from xxhash import xxh3_64

from kvoffload.disk.open_folder import OpenFolder
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import SlotId
from kvoffload.model.wire import DiskRecord, Invalidate, Put

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX_NAME, _NEW = "index", "index.new"
_MAGIC, _VERSION = b"KVOINDEX", 2
_HEADER = struct.Struct("<8sIH16s")  # magic, version, ranks, generation; then the files' ids
_BATCH = struct.Struct("<IIQ8s")  # magic, bytes of the records, number, checksum
_BATCH_MAGIC = 0x4B564F42
_SUM_BYTES = 8
_NUMBER = struct.Struct("<Q")
_ID_BYTES = 16
_KEY_BYTES = 64
_PUT, _INVALIDATE, _USE = 1, 2, 3
_MOST_RECORDS = 4096
"""In a batch of a rewritten index: a flipped bit costs no more than these."""
_LEAST_GARBAGE = 2**16  # records
_MOST_UNWRITTEN = 2**20  # records that may wait for a disk that hangs, to be written at once
_HEAD_BYTES = 2**16  # room for the ids of 4,000 ranks' files


class NotAnIndex(DiskError):
    """Raised for bytes that are not an index of these slot files; the message says what they are."""


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What an index describes.

    Args:
        generation: 16 random bytes, new after each reset. Compared for equality only.
        files: the ids of the ranks' slot files.
        slots: that each of them has; not in the index.
        key: authenticates header and batches; None for checksums.
    """

    generation: bytes
    files: tuple[bytes, ...]
    slots: int
    key: TierKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The blocks in some slots, the least recently used first.

    Args:
        records: [entries], each with `slot`, `key` and `sums` as in the file.
    """

    records: NDArray[np.void]

    @classmethod
    def none(cls, ranks: int) -> Entries:
        """Return no entries."""
        return cls(np.empty(0, record_type(ranks)))

    def __len__(self) -> int:
        return len(self.records)

    def puts(self, start: int = 0, end: int | None = None) -> list[Put]:
        """Return entries as records."""
        part = self.records[start:end]
        raw = part["key"].tobytes()  # entry by entry it takes ten times as long
        sizes = zip(range(0, len(raw), _KEY_BYTES), part["key_bytes"].tolist(), strict=True)
        keys: list[Any] = [raw[place : place + size] for place, size in sizes]
        sums: Iterable[tuple[int, ...]] = zip(*part["sums"].T.tolist(), strict=True)
        return list(map(Put, part["slot"].tolist(), keys, sums))

    def free(self, slots: int) -> list[SlotId]:
        """Return the slots without an entry of a file with so many, the last one first: the pool takes them from the end."""
        is_free = np.ones(slots, np.bool_)
        is_free[self.records["slot"]] = False
        return cast("list[SlotId]", np.flatnonzero(is_free)[::-1].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class IndexContents:
    """What an index says.

    Args:
        header: its files, their slots and its generation.
        entries: the blocks that can be found.
        end: bytes up to the end of the last complete batch.
        is_cut: whether an incomplete batch follows.
    """

    header: IndexHeader
    entries: Entries
    end: int
    is_cut: bool


def record_type(ranks: int) -> np.dtype[np.void]:
    """Return the type of a record in the file; only puts have a key and checksums."""
    key = ("key_bytes", "u1"), ("key", f"V{_KEY_BYTES}")
    return np.dtype([("slot", "<u4"), ("kind", "u1"), *key, ("sums", "<u8", (ranks,))])


def encode_header(header: IndexHeader) -> bytes:
    """Return the bytes that an index begins with."""
    fixed = _HEADER.pack(_MAGIC, _VERSION, len(header.files), header.generation)
    packed = fixed + b"".join(header.files)
    return packed + _sum(header.key, b"index", packed)


def encode_batch(header: IndexHeader, number: int, records: Iterable[DiskRecord]) -> bytes:
    """Return a batch of records in order; `number` counts the batches before it.

    Raises:
        DiskError: a key is longer than the index has room for.
    """
    rows = np.array(list(map(_row, records)), record_type(len(header.files)))
    return _batch(header, number, rows)


def encode_index(header: IndexHeader, entries: Entries) -> tuple[bytes, int]:
    """Return an index of these contents with the fewest records, and the number of its batches."""
    starts = range(0, len(entries), _MOST_RECORDS)
    parts = [
        _batch(header, number, entries.records[start : start + _MOST_RECORDS])
        for number, start in enumerate(starts)
    ]
    return encode_header(header) + b"".join(parts), len(parts)


def read_header(data: bytes, slots: int, key: TierKey | None = None) -> IndexHeader:
    """Return the header of an index.

    Args:
        data: its first bytes, up to the end of the header at least.
        slots: that each of its files has.
        key: as of `IndexHeader`.

    Raises:
        NotAnIndex: it has another format, or is damaged.
    """
    if not any(data[: len(_MAGIC)]):
        raise NotAnIndex("it is empty, or was erased by a reset")
    if not data.startswith(_MAGIC):
        raise NotAnIndex(f"it begins with {data[: len(_MAGIC)]!r}, not with {_MAGIC!r}")
    if len(data) < _HEADER.size:
        raise NotAnIndex(f"it ends after {len(data)} bytes, in its header")
    _, version, ranks, generation = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise NotAnIndex(f"its format is version {version}, not {_VERSION}")
    end = _HEADER.size + ranks * _ID_BYTES
    checksum = data[end : end + _SUM_BYTES]
    if not ranks or not compare_digest(checksum, _sum(key, b"index", data[:end])):
        raise NotAnIndex("its header is incomplete or damaged")
    places = range(_HEADER.size, end, _ID_BYTES)
    files = tuple([data[place : place + _ID_BYTES] for place in places])
    return IndexHeader(generation, files, slots, key)


def read_index(data: bytes, slots: int, key: TierKey | None = None) -> IndexContents:
    """Return the contents of an index up to its first incomplete batch.

    Args:
        data: all of it.
        slots: that each of its files has. Records of others are left out.
        key: as of `IndexHeader`.

    Raises:
        NotAnIndex: it has another format, or is damaged.
    """
    header = read_header(data, slots, key)
    batches, end = list["NDArray[np.void]"](), len(encode_header(header))
    while (batch := _read_batch(header, len(batches), data, end)) is not None:
        batches.append(batch)
        end += _BATCH.size + batch.nbytes
    return IndexContents(header, _entries(header, batches), end, end < len(data))


def _row(record: DiskRecord) -> tuple[object, ...]:
    if not isinstance(record, Put):
        return record.slot, _INVALIDATE if isinstance(record, Invalidate) else _USE, 0, b"", 0
    if len(record.key) > _KEY_BYTES:
        raise DiskError(f"the index has room for keys of {_KEY_BYTES} bytes, and one has {len(record.key)}")
    return record.slot, _PUT, len(record.key), record.key, record.sums


def _batch(header: IndexHeader, number: int, records: NDArray[np.void]) -> bytes:
    data = records.tobytes()
    return _BATCH.pack(_BATCH_MAGIC, len(data), number, _batch_sum(header, number, data)) + data


def _batch_sum(header: IndexHeader, number: int, data: bytes | memoryview) -> bytes:
    return _sum(header.key, b"batch" + header.generation + _NUMBER.pack(number), data)


def _sum(key: TierKey | None, context: bytes, data: bytes | memoryview) -> bytes:
    """Return the checksum of some data, or its MAC."""
    if key is not None:
        return key.mac(context, data)[:_SUM_BYTES]
    state = xxh3_64(context)
    state.update(data)
    return state.digest()


def _read_batch(header: IndexHeader, number: int, data: bytes, start: int) -> NDArray[np.void] | None:
    """Return the records of the batch that begins here, None if it is incomplete."""
    first = start + _BATCH.size
    if first > len(data):
        return None
    magic, size, its_number, checksum = _BATCH.unpack_from(data, start)
    one = record_type(len(header.files))
    if magic != _BATCH_MAGIC or its_number != number or first + size > len(data) or size % one.itemsize:
        return None
    records = memoryview(data)[first : first + size]
    if not compare_digest(_batch_sum(header, number, records), checksum):
        return None
    return np.frombuffer(records, one)


def _entries(header: IndexHeader, batches: Iterable[NDArray[np.void]]) -> Entries:
    """Return what the slots hold after these batches. Of several records of one slot numpy assigns the last."""
    records = np.concatenate([Entries.none(len(header.files)).records, *batches])
    records = records[records["slot"] < header.slots]
    places, is_change = np.arange(len(records)), records["kind"] != _USE
    used = np.full(header.slots, -1, np.int64)
    used[records["slot"]] = places
    changed = np.full(header.slots, -1, np.int64)
    changed[records["slot"][is_change]] = places[is_change]
    held = np.flatnonzero(changed >= 0)
    held = held[records["kind"][changed[held]] == _PUT]
    return Entries(records[changed[held[np.argsort(used[held])]]])


class IndexLog:
    """An index that is open for more records. `start_index` makes it.

    Attributes:
        header: its files, their slots and its generation.
        records: that it has, those without effect too.
    """

    def __init__(
        self, folder: OpenFolder, header: IndexHeader, descriptor: int, end: int, batches: int, records: int
    ) -> None:
        self.header = header
        self.records = records
        self._folder = folder
        self._descriptor = descriptor
        self._end = end
        self._batches = batches

    def append(self, records: Sequence[DiskRecord]) -> None:
        """Append records in order. They survive this process, and after `sync` a power failure too.

        Raises:
            OSError: the disk is full, failing or gone. The index may lack these records; it is not damaged otherwise.
        """
        if not records:
            return
        batch = encode_batch(self.header, self._batches, records)
        _write_all(self._descriptor, batch, self._end)
        self._end += len(batch)
        self._batches += 1
        self.records += len(records)

    def sync(self) -> None:
        """Make all records durable.

        Raises:
            OSError: the disk is full, failing or gone.
        """
        os.fdatasync(self._descriptor)

    def is_mostly_garbage(self, entries: int) -> bool:
        """Whether `rewritten` would make it much smaller, given the number of entries that its records leave."""
        return self.records - entries > max(entries, _LEAST_GARBAGE)

    def rewritten(self) -> IndexLog:
        """Replace this index by one of the same contents with the fewest records; close this one and return that one.

        Raises:
            OSError: the disk is full, failing or gone; this index stays as it is.
        """
        contents = read_index(_read_all(self._descriptor, self._end), self.header.slots, self.header.key)
        if contents.end != self._end:
            raise OSError(errno.EIO, "the index reads otherwise than it was written")
        rewritten = start_index(self._folder, self.header, contents.entries)
        self.close()
        return rewritten

    def erase(self) -> None:
        """Make the index unreadable, durably, wherever its file is by now.

        Raises:
            OSError: the disk is full, failing or gone.
        """
        _write_all(self._descriptor, bytes(len(encode_header(self.header))), 0)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file. What was not synced is the kernel's to write."""
        os.close(self._descriptor)


def new_generation() -> bytes:
    """Return a new random generation."""
    return secrets.token_bytes(16)


def load_index(folder: OpenFolder, slots: int, key: TierKey | None = None) -> IndexContents | None:
    """Return the contents of a folder's index; None if there is none.

    Args:
        folder: where it is.
        slots: that each of its files has. Records of others are left out.
        key: as of its header.

    Raises:
        NotAnIndex: it has another format, is damaged, or is larger than one of so many slots.
        DiskError: it is not a plain file of this user.
        OSError: the disk is failing or gone.
    """
    try:
        descriptor = folder.open(INDEX_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        header = read_header(_read_all(descriptor, min(size, _HEAD_BYTES)), slots, key)
        # `is_mostly_garbage` bounds what has no effect.
        most_records = 2 * header.slots + _LEAST_GARBAGE + _MOST_UNWRITTEN
        most = _HEAD_BYTES + most_records * (_BATCH.size + record_type(len(header.files)).itemsize)
        if size > most:
            raise NotAnIndex(f"it has {size} bytes, and {header.slots} slots take at most {most}")
        return read_index(_read_all(descriptor, size), slots, key)
    finally:
        os.close(descriptor)


def start_index(folder: OpenFolder, header: IndexHeader, entries: Entries | None = None) -> IndexLog:
    """Replace the folder's index by one of these entries, synced, and return it.

    Args:
        folder: where; the caller has it locked.
        header: what the index is about.
        entries: its contents; by default nothing.

    Raises:
        OSError: the disk is full, failing or gone; the folder's index is the old one or the new one.
    """
    entries = entries if entries is not None else Entries.none(len(header.files))
    data, batches = encode_index(header, entries)
    descriptor = folder.make_file(_NEW)
    try:
        _write_all(descriptor, data, 0)
        os.fdatasync(descriptor)
        folder.rename(_NEW, INDEX_NAME)
    except BaseException:
        os.close(descriptor)
        raise
    return IndexLog(folder, header, descriptor, len(data), batches, len(entries))


def remove_index(folder: OpenFolder, index: IndexLog | None) -> None:
    """Remove the index of a folder: nothing in the slot files is found again.

    Args:
        folder: as it was locked.
        index: the open one, which is erased first; None if it was not opened.

    Raises:
        DiskError: the folder's path leads elsewhere by now, where another index may lie.
        OSError: the disk is failing or gone.
    """
    try:
        if index is not None:
            index.erase()
    finally:
        folder.unlink(INDEX_NAME)
        folder.sync()
    if not folder.is_at_its_path():
        raise DiskError(
            f"{folder.path} is not the folder any more in which this engine put its blocks: it was moved, replaced or unmounted"
        )


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        if (count := os.pwrite(descriptor, rest, offset)) <= 0:
            raise OSError(errno.EIO, "a write to the index wrote nothing")
        rest, offset = rest[count:], offset + count


def _read_all(descriptor: int, size: int) -> bytes:
    parts, offset = [], 0
    while offset < size and (part := os.pread(descriptor, min(size - offset, 2**26), offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
