"""The index of the slot files, as bytes: which block each slot holds. Pure.

    header                             batch                                 run: records of one kind
    "KVOINDEX" version                 magic, bytes, number, checksum        kind, key bytes, count
    generation, slots, ids of files    run, run, ...                         put: slot, key, a checksum a rank
    checksum                                                                 strike, use: slot

A log of what happened, in order: a slot was given a block (put), lost it (strike), or had it read (use). The checksum of
a batch covers its number and the log's generation, so neither an older log's bytes nor a batch in another place can pass.
With a key, the checksums of header, batches and ranks' shards are MACs, so an index that another writer made is not read.
Reading stops at the first incomplete batch. What is lost with it costs hits, never correctness: a slot whose strike is lost is still
indexed under its old block, but its bytes do not have that block's checksums.

Records of one kind lie side by side, so that numpy reads a million of them in a few thousand calls.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from kvoffload.disk.tier_key import TierKey, are_equal
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import SlotId
from kvoffload.model.wire import DiskRecord, Put, Strike

if TYPE_CHECKING:
    from numpy.typing import NDArray

GENERATION_BYTES = 16

_MAGIC, _VERSION = b"KVOINDEX", 1
_HEADER = struct.Struct("<8sIH16sQ")  # magic, version, ranks, generation, slots; then the files' ids
_BATCH = struct.Struct("<IIQQ")  # magic, bytes of the runs, number, checksum
_BATCH_MAGIC = 0x4B564F42
_RUN = struct.Struct("<BBI")  # kind, bytes of a key, records
_SUM = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")
_ID_BYTES = 16
_LONGEST_KEY = 255  # bytes
_PUT, _STRIKE, _USE = 1, 2, 3
_MOST_RECORDS = 4096
"""In a batch of a rewritten index: a flipped bit costs no more than these."""


class NotAnIndex(DiskError):
    """Bytes that are no index of these slot files; the message says what they are."""


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What an index describes.

    Args:
        generation: 16 random bytes, new after each reset. Compared for equality only.
        files: the ids of the ranks' slot files.
        slots: slots of each of them.
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
        return cls(np.empty(0, put_type(ranks, 1)))

    def __len__(self) -> int:
        return len(self.records)

    def puts(self, start: int = 0, end: int | None = None) -> list[Put]:
        """Return entries as records."""
        part = self.records[start:end]
        size = part["key"].dtype.itemsize
        raw = part["key"].tobytes()  # entry by entry it takes ten times as long
        keys: list[Any] = [raw[place : place + size] for place in range(0, len(raw), size)]
        sums: Iterable[tuple[int, ...]] = zip(*part["sums"].T.tolist(), strict=True)
        return list(map(Put, part["slot"].tolist(), keys, sums))

    def fit(self, capacity: int, slots: int) -> tuple[Entries, list[SlotId]]:
        """Return the most recently used entries that `capacity` slots can hold, and the free ones of these slots.

        Every entry stays where it is, so the slots that may hold a block need not be adjacent.

        Args:
            capacity: slots that may hold a block.
            slots: slots of the file.
        """
        there = self.records[self.records["slot"] < slots]
        kept = there[max(len(there) - capacity, 0) :]
        is_free = np.ones(slots, np.bool_)
        is_free[kept["slot"]] = False
        free = cast("list[SlotId]", np.flatnonzero(is_free).tolist())
        return Entries(kept), free[: capacity - len(kept)]


@dataclass(frozen=True, slots=True, eq=False)
class IndexContents:
    """What an index says.

    Args:
        header: what it is about.
        entries: the blocks that can be found.
        end: bytes up to the end of the last complete batch.
        is_cut: whether an incomplete batch follows.
    """

    header: IndexHeader
    entries: Entries
    end: int
    is_cut: bool


def encode_header(header: IndexHeader) -> bytes:
    """Return the bytes that an index begins with."""
    fixed = _HEADER.pack(_MAGIC, _VERSION, len(header.files), header.generation, header.slots)
    packed = fixed + b"".join(header.files)
    return packed + _header_sum(packed, header.key)


def encode_batch(header: IndexHeader, number: int, records: Iterable[DiskRecord]) -> bytes:
    """Return a batch of records in order; `number` counts the batches before it."""
    runs = b"".join(_run(kind, key_bytes, list(same)) for (kind, key_bytes), same in groupby(records, _kind))
    return _batch(header, number, runs)


def encode_index(header: IndexHeader, entries: Entries) -> tuple[bytes, int]:
    """Return an index of these contents with the fewest records, and the number of its batches."""
    parts, key_bytes = [encode_header(header)], entries.records["key"].dtype.itemsize
    for number, start in enumerate(range(0, len(entries), _MOST_RECORDS)):
        some = entries.records[start : start + _MOST_RECORDS]
        parts.append(_batch(header, number, _RUN.pack(_PUT, key_bytes, len(some)) + some.tobytes()))
    return b"".join(parts), len(parts) - 1


def most_bytes(header: IndexHeader, most_records: int) -> int:
    """Return the most bytes of an index with so many records: each in a batch of its own, with the longest key."""
    put = put_type(len(header.files), _LONGEST_KEY).itemsize
    return len(encode_header(header)) + most_records * (_BATCH.size + _RUN.size + put)


def read_header(data: bytes, most_slots: int, key: TierKey | None = None) -> IndexHeader:
    """Return the header of an index.

    Args:
        data: its first bytes, up to the end of the header at least.
        most_slots: of the files that it is about. In memory an index is as large as its slots, whatever its size on disk.
        key: as of `IndexHeader`.

    Raises:
        NotAnIndex: it has another format, is damaged, or has more slots than the files.
    """
    if not any(data[: len(_MAGIC)]):
        raise NotAnIndex("it is empty, or was erased by a reset")
    if not data.startswith(_MAGIC):
        raise NotAnIndex(f"it begins with {data[: len(_MAGIC)]!r}, not with {_MAGIC!r}")
    if len(data) < _HEADER.size:
        raise NotAnIndex(f"it ends after {len(data)} bytes, in its header")
    _, version, ranks, generation, slots = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise NotAnIndex(f"its format is version {version}, not {_VERSION}")
    end = _HEADER.size + ranks * _ID_BYTES
    if not ranks or not compare_digest(data[end : end + _SUM.size], _header_sum(data[:end], key)):
        raise NotAnIndex("its header is incomplete or damaged")
    if slots > most_slots:
        raise NotAnIndex(f"it has {slots} slots, and its files have {most_slots}")
    places = range(_HEADER.size, end, _ID_BYTES)
    files = tuple([data[place : place + _ID_BYTES] for place in places])
    return IndexHeader(generation, files, slots, key)


def read_index(data: bytes, most_slots: int, key: TierKey | None = None) -> IndexContents:
    """Return the contents of an index up to its first incomplete batch.

    Args:
        data: all of it.
        most_slots: of the files that it is about.
        key: as of `IndexHeader`.

    Raises:
        NotAnIndex: it has another format, is damaged, or has more slots than the files.
    """
    header = read_header(data, most_slots, key)
    slots = _Slots(header)
    end, number = len(encode_header(header)), 0
    while (runs := _read_batch(header, number, data, end)) is not None and slots.take(runs):
        end, number = end + _BATCH.size + len(runs), number + 1
    return IndexContents(header, slots.entries(), end, end < len(data))


def _batch(header: IndexHeader, number: int, runs: bytes) -> bytes:
    return _BATCH.pack(_BATCH_MAGIC, len(runs), number, _checksum(header, number, runs)) + runs


def _kind(record: DiskRecord) -> tuple[int, int]:
    if isinstance(record, Put):
        return _PUT, len(record.key)
    return (_STRIKE if isinstance(record, Strike) else _USE), 0


def _run(kind: int, key_bytes: int, records: Sequence[DiskRecord]) -> bytes:
    head = _RUN.pack(kind, key_bytes, len(records))
    if kind != _PUT:
        return head + struct.pack(f"<{len(records)}I", *[record.slot for record in records])
    puts = [record for record in records if isinstance(record, Put)]
    one = struct.Struct(f"<I{key_bytes}s{len(puts[0].sums)}Q")
    return head + b"".join([one.pack(put.slot, put.key, *put.sums) for put in puts])


def _header_sum(packed: bytes, key: TierKey | None) -> bytes:
    return _SUM.pack(xxh3_64_intdigest(packed) if key is None else key.sum(b"index", packed))


def _checksum(header: IndexHeader, number: int, runs: bytes | memoryview) -> int:
    if header.key is not None:
        return header.key.sum(b"batch" + header.generation + _NUMBER.pack(number), runs)
    state = xxh3_64(header.generation)
    state.update(_NUMBER.pack(number))
    state.update(runs)
    return state.intdigest()


def _read_batch(header: IndexHeader, number: int, data: bytes, start: int) -> memoryview | None:
    """Return the runs of the batch that begins here, None if it is incomplete."""
    if start + _BATCH.size > len(data):
        return None
    magic, size, its_number, checksum = _BATCH.unpack_from(data, start)
    first = start + _BATCH.size
    if magic != _BATCH_MAGIC or its_number != number or first + size > len(data):
        return None
    runs = memoryview(data)[first : first + size]
    return runs if are_equal(_checksum(header, number, runs), checksum) else None


class _Slots:
    """What each slot holds after the batches taken so far."""

    def __init__(self, header: IndexHeader) -> None:
        self._ranks = len(header.files)
        self._puts: NDArray[np.void] | None = None  # the last put of each slot
        self._used = np.full(header.slots, -1, np.int64)  # the last put or use is which record, -1: no block
        self._records = 0

    def take(self, data: memoryview) -> bool:
        """Apply the runs of a batch; if they are inconsistent, apply none and return False."""
        runs: list[tuple[int, NDArray[np.void]]] = []
        start = 0
        while start < len(data):
            if start + _RUN.size > len(data):
                return False
            kind, key_bytes, count = _RUN.unpack_from(data, start)
            start += _RUN.size
            one = self._type(kind, key_bytes)
            if one is None or not count or start + count * one.itemsize > len(data):
                return False
            runs.append((kind, np.frombuffer(data, one, count, start)))
            start += count * one.itemsize
        for kind, run in runs:
            self._apply(kind, run)
        return True

    def entries(self) -> Entries:
        """Return the blocks that are left, the least recently used first."""
        if self._puts is None:
            return Entries.none(self._ranks)
        held = np.flatnonzero(self._used >= 0)
        return Entries(self._puts[held[np.argsort(self._used[held])]])

    def _type(self, kind: int, key_bytes: int) -> np.dtype[np.void] | None:
        """Return the type of a run's records; None for a kind that does not exist, or keys not as long as the first."""
        if kind in (_STRIKE, _USE):
            return None if key_bytes else _SLOT_TYPE
        if kind != _PUT or not key_bytes:
            return None
        if self._puts is None:
            self._puts = np.zeros(len(self._used), put_type(self._ranks, key_bytes))
        return self._puts.dtype if self._puts.dtype["key"].itemsize == key_bytes else None

    def _apply(self, kind: int, run: NDArray[np.void]) -> None:
        """Apply records in order: of those with one slot numpy assigns the last. Slots that no file has are left out."""
        places = np.arange(self._records, self._records + len(run))
        self._records += len(run)
        is_there = run["slot"] < len(self._used)
        slots, places = run["slot"][is_there], places[is_there]
        if kind == _STRIKE:
            self._used[slots] = -1
        elif kind == _USE:
            self._used[slots] = np.where(self._used[slots] < 0, -1, places)
        elif self._puts is not None:
            self._used[slots] = places
            self._puts[slots] = run[is_there]


_SLOT_TYPE: np.dtype[np.void] = np.dtype([("slot", "<u4")])


def put_type(ranks: int, key_bytes: int) -> np.dtype[np.void]:
    """Return the type of a put in the file."""
    return np.dtype([("slot", "<u4"), ("key", f"V{key_bytes}"), ("sums", "<u8", (ranks,))])
