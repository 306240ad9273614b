"""The index of the disk tier: says which block is in each slot of the slot files.

    header                             batch                                    record
    "KVOINDEX" version                 magic, bytes, number, checksum           slot, kind, key, checksum per rank
    generation, fingerprint            record, record, ...
    ids of files, checksum

The header has the fingerprint of the KV, because a folder can be renamed, copied or restored under another name.

The index is a log of three kinds of records: a slot was filled with a block (put), invalidated, or read (use). A
batch's checksum also covers the number of the batch and the generation of the index. So a batch is rejected if it
comes from an older index or is in the wrong place. With a tier key, the checksums of the header, of the batches and
of the blocks are MACs, so an index that was written without the key is rejected. Reading stops at the first
incomplete batch. Lost records cost hits but never correctness. If the record of an invalidation is lost, for example,
the index still has the slot's old block, but the bytes in the slot do not match that block's checksums.

All records have the same size, so that numpy can read a million of them in a few calls.

Records are only appended. When the index is compacted, or a new one is started, the new index is written to a new
file, synced, and then renamed. So the file's name always refers to a complete index. The functions of this module may
wait for the disk. Call them on one thread at a time, and never on an engine's thread.
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

from kvoffload.disk.open_folder import FINGERPRINT_BYTES, OpenFolder
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import SlotId
from kvoffload.model.wire import DiskRecord, Invalidate, Put

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX_NAME, _NEW = "index", "index.new"
_MAGIC, _VERSION = b"KVOINDEX", 3
# magic, version, number of ranks, generation, fingerprint; then the slot files' ids
_HEADER = struct.Struct(f"<8sIH16s{FINGERPRINT_BYTES}s")
_BATCH = struct.Struct("<IIQ8s")  # magic, length of the records in bytes, batch number, checksum
_BATCH_MAGIC = 0x4B564F42
_SUM_BYTES = 8
_NUMBER = struct.Struct("<Q")
_ID_BYTES = 16
KEY_BYTES = 64
_PUT, _INVALIDATE, _USE = 1, 2, 3
_MOST_RECORDS = 4096
"""The maximum number of records in one batch of a compacted index.

The limit is low because a damaged batch makes all later batches unreadable.
"""
_LEAST_GARBAGE = 2**16  # the index is compacted only if more records than this are obsolete
_MOST_UNWRITTEN = 2**20  # an allowance for records that waited while the disk hung
_HEAD_BYTES = 2**16  # enough for the ids of 4,000 slot files


class NotAnIndex(DiskError):
    """Raised when bytes are not a readable index. The message has the reason."""


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The header of an index: its generation, and the slot files that it describes.

    Args:
        generation: 16 random bytes. A reset of the cache starts a new generation.
        files: the id of each rank's slot file.
        slots: the number of slots in each file. It is not stored in the index.
        fingerprint: the fingerprint of the KV.
        key: authenticates the header and the batches; None for plain checksums.
    """

    generation: bytes
    files: tuple[bytes, ...]
    slots: int
    fingerprint: str
    key: TierKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The blocks in the index, the least recently used first.

    Args:
        records: an array of shape [entries] and type `record_type`, with a put record for each block.
    """

    records: NDArray[np.void]

    @classmethod
    def none(cls, ranks: int) -> Entries:
        """Return entries without any block."""
        return cls(np.empty(0, record_type(ranks)))

    def __len__(self) -> int:
        return len(self.records)

    def puts(self, start: int = 0, end: int | None = None) -> list[Put]:
        """Return a put record for each entry from `start` up to `end`."""
        part = self.records[start:end]
        raw = part["key"].tobytes()  # converting each key separately would take ten times as long
        sizes = zip(range(0, len(raw), KEY_BYTES), part["key_bytes"].tolist(), strict=True)
        keys: list[Any] = [raw[place : place + size] for place, size in sizes]
        sums: Iterable[tuple[int, ...]] = zip(*part["sums"].T.tolist(), strict=True)
        return list(map(Put, part["slot"].tolist(), keys, sums))

    def free(self, slots: int) -> list[SlotId]:
        """Return the slots without an entry, the highest first, because the pool takes slots from the list's end."""
        is_free = np.ones(slots, np.bool_)
        is_free[self.records["slot"]] = False
        return cast("list[SlotId]", np.flatnonzero(is_free)[::-1].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class IndexContents:
    """The contents of an index.

    Args:
        header: the index's generation and slot files.
        entries: the blocks in the index after its last complete batch.
        end: where the last complete batch ends, in bytes from the start of the file.
        is_cut: whether an incomplete batch follows after `end`.
    """

    header: IndexHeader
    entries: Entries
    end: int
    is_cut: bool


def record_type(ranks: int) -> np.dtype[np.void]:
    """Return the numpy type of a record in the index. Only put records use the key and the checksums."""
    key = ("key_bytes", "u1"), ("key", f"V{KEY_BYTES}")
    return np.dtype([("slot", "<u4"), ("kind", "u1"), *key, ("sums", "<u8", (ranks,))])


def encode_header(header: IndexHeader) -> bytes:
    """Return the header as bytes. An index begins with these bytes."""
    fixed = _HEADER.pack(_MAGIC, _VERSION, len(header.files), header.generation, header.fingerprint.encode())
    packed = fixed + b"".join(header.files)
    return packed + _sum(header.key, b"index", packed)


def encode_batch(header: IndexHeader, number: int, records: Iterable[DiskRecord]) -> bytes:
    """Return a batch with `records`. `number` is the number of batches before this batch in the index.

    Raises:
        DiskError: a key is too long for the index.
    """
    rows = np.array(list(map(_row, records)), record_type(len(header.files)))
    return _batch(header, number, rows)


def encode_index(header: IndexHeader, entries: Entries) -> tuple[bytes, int]:
    """Return an index with one record for each entry, and the number of batches in this index."""
    starts = range(0, len(entries), _MOST_RECORDS)
    parts = [
        _batch(header, number, entries.records[start : start + _MOST_RECORDS])
        for number, start in enumerate(starts)
    ]
    return encode_header(header) + b"".join(parts), len(parts)


def read_header(data: bytes, slots: int, fingerprint: str, key: TierKey | None = None) -> IndexHeader:
    """Return the header of an index.

    Args:
        data: the first bytes of the index; they must include the whole header.
        slots: the number of slots in each file.
        fingerprint: the fingerprint of the engine's KV.
        key: authenticates the header; None for a plain checksum.

    Raises:
        NotAnIndex: the header has another format, is damaged, or has another fingerprint.
    """
    if not any(data[: len(_MAGIC)]):
        raise NotAnIndex("it is empty, or was erased by a reset")
    if not data.startswith(_MAGIC):
        raise NotAnIndex(f"it begins with {data[: len(_MAGIC)]!r}, not with {_MAGIC!r}")
    if len(data) < _HEADER.size:
        raise NotAnIndex(f"it ends after {len(data)} bytes, in its header")
    _, version, ranks, generation, found = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise NotAnIndex(f"its format is version {version}, not {_VERSION}")
    if (found := found.rstrip(b"\0")) != fingerprint.encode():
        # With a tier key, this comes before the checksum, because other KV has another key.
        raise NotAnIndex(f"it was made for other KV, with the fingerprint {found.decode(errors='replace')!r}")
    end = _HEADER.size + ranks * _ID_BYTES
    checksum = data[end : end + _SUM_BYTES]
    if not ranks or not compare_digest(checksum, _sum(key, b"index", data[:end])):
        raise NotAnIndex("its header is incomplete or damaged")
    places = range(_HEADER.size, end, _ID_BYTES)
    files = tuple([data[place : place + _ID_BYTES] for place in places])
    return IndexHeader(generation, files, slots, fingerprint, key)


def read_index(data: bytes, slots: int, fingerprint: str, key: TierKey | None = None) -> IndexContents:
    """Return the contents of an index up to its first incomplete batch.

    Args:
        data: the whole index.
        slots: the number of slots in each file. Records for higher slots are ignored.
        fingerprint: the fingerprint of the engine's KV.
        key: authenticates the header and the batches; None for plain checksums.

    Raises:
        NotAnIndex: the header has another format, is damaged, or has another fingerprint.
    """
    header = read_header(data, slots, fingerprint, key)
    batches, end = list["NDArray[np.void]"](), len(encode_header(header))
    while (batch := _read_batch(header, len(batches), data, end)) is not None:
        batches.append(batch)
        end += _BATCH.size + batch.nbytes
    return IndexContents(header, _entries(header, batches), end, end < len(data))


def _row(record: DiskRecord) -> tuple[object, ...]:
    if not isinstance(record, Put):
        return record.slot, _INVALIDATE if isinstance(record, Invalidate) else _USE, 0, b"", 0
    if len(record.key) > KEY_BYTES:
        raise DiskError(f"the index has room for keys of {KEY_BYTES} bytes, and one has {len(record.key)}")
    return record.slot, _PUT, len(record.key), record.key, record.sums


def _batch(header: IndexHeader, number: int, records: NDArray[np.void]) -> bytes:
    data = records.tobytes()
    return _BATCH.pack(_BATCH_MAGIC, len(data), number, _batch_sum(header, number, data)) + data


def _batch_sum(header: IndexHeader, number: int, data: bytes | memoryview) -> bytes:
    return _sum(header.key, b"batch" + header.generation + _NUMBER.pack(number), data)


def _sum(key: TierKey | None, context: bytes, data: bytes | memoryview) -> bytes:
    """Return the checksum of `context` and `data`, or their MAC if there is a key."""
    if key is not None:
        return key.mac(context, data)[:_SUM_BYTES]
    state = xxh3_64(context)
    state.update(data)
    return state.digest()


def _read_batch(header: IndexHeader, number: int, data: bytes, start: int) -> NDArray[np.void] | None:
    """Return the records of the batch at `start`; None if that batch is incomplete or damaged."""
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
    """Return the entries that remain after applying the batches' records in order.

    If several records name the same slot, numpy's assignments keep the last one.
    """
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
    """An open index to which records can be appended. `start_index` returns it.

    Attributes:
        header: the index's generation and slot files.
        records: the number of records in the index, including obsolete records.
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
        """Append a batch of records in the given order.

        Appended records are kept if this process dies. After `sync`, they are also kept if the power fails.

        Raises:
            OSError: the disk is full, failing or gone. The new records may be missing, but earlier records are intact.
        """
        if not records:
            return
        batch = encode_batch(self.header, self._batches, records)
        _write_all(self._descriptor, batch, self._end)
        self._end += len(batch)
        self._batches += 1
        self.records += len(records)

    def sync(self) -> None:
        """Write all appended records to the disk.

        Raises:
            OSError: the disk is full, failing or gone.
        """
        os.fdatasync(self._descriptor)

    def is_mostly_garbage(self, entries: int) -> bool:
        """Return whether `rewritten` would make an index of `entries` blocks much smaller than this index."""
        return self.records - entries > max(entries, _LEAST_GARBAGE)

    def rewritten(self) -> IndexLog:
        """Replace this index with an index that has one record per entry. Close this index and return the new index.

        Raises:
            OSError: the disk is full, failing or gone. This index stays open.
        """
        header = self.header
        data = _read_all(self._descriptor, self._end)
        contents = read_index(data, header.slots, header.fingerprint, header.key)
        if contents.end != self._end:
            raise OSError(errno.EIO, "the index reads otherwise than it was written")
        rewritten = start_index(self._folder, self.header, contents.entries)
        self.close()
        return rewritten

    def erase(self) -> None:
        """Overwrite the header and sync it, so that the index cannot be read even if its file was moved.

        Raises:
            OSError: the disk is full, failing or gone.
        """
        _write_all(self._descriptor, bytes(len(encode_header(self.header))), 0)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file. The kernel will write records that were not synced."""
        os.close(self._descriptor)


def new_generation() -> bytes:
    return secrets.token_bytes(16)


def load_index(folder: OpenFolder, slots: int, key: TierKey | None = None) -> IndexContents | None:
    """Return the contents of a folder's index; None if the folder has no index.

    Args:
        folder: the folder of the index; its fingerprint must be the index's.
        slots: the number of slots in each file. Records for higher slots are ignored.
        key: authenticates the header and the batches; None for plain checksums.

    Raises:
        NotAnIndex: the index has another format or fingerprint, is damaged, or is too large for this number of slots.
        DiskError: the index is not a plain file of this user.
        OSError: the disk is failing or gone.
    """
    try:
        descriptor = folder.open(INDEX_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        header = read_header(_read_all(descriptor, min(size, _HEAD_BYTES)), slots, folder.fingerprint, key)
        # A longer index would have been compacted (`is_mostly_garbage`).
        most_records = 2 * header.slots + _LEAST_GARBAGE + _MOST_UNWRITTEN
        most = _HEAD_BYTES + most_records * (_BATCH.size + record_type(len(header.files)).itemsize)
        if size > most:
            raise NotAnIndex(f"it has {size} bytes, and {header.slots} slots take at most {most}")
        return read_index(_read_all(descriptor, size), slots, folder.fingerprint, key)
    finally:
        os.close(descriptor)


def start_index(folder: OpenFolder, header: IndexHeader, entries: Entries | None = None) -> IndexLog:
    """Replace the folder's index with a new index of these entries, sync it, and return it.

    Args:
        folder: the folder of the index; the caller must have locked it.
        header: the header of the new index.
        entries: the entries of the new index; by default none.

    Raises:
        OSError: the disk is full, failing or gone. The folder has either the old index or the new index.
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
    """Remove a folder's index, so that no later process finds a block in the slot files.

    Args:
        folder: the locked folder.
        index: the folder's open index, which is erased before its file is removed; None if the index was not opened.

    Raises:
        DiskError: the folder's path now leads to another folder, which may contain another index.
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
