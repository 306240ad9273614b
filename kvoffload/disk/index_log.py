"""The index in its file. Everything here may wait for the disk; one thread at a time calls it, and never an engine's.

The file is only appended to. To compact it, to begin a new generation or after a change of the slot files, a new file is written beside
it, synced and renamed: the name refers to one complete index at any time.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence

from kvoffload.disk.index_format import (
    GENERATION_BYTES,
    Entries,
    IndexContents,
    IndexHeader,
    NotAnIndex,
    encode_batch,
    encode_header,
    encode_index,
    most_bytes,
    read_header,
    read_index,
)
from kvoffload.disk.open_folder import OpenFolder
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.errors import DiskError
from kvoffload.model.wire import DiskRecord

INDEX_NAME, _NEW = "index", "index.new"
_LEAST_GARBAGE = 2**16  # records
_MOST_UNWRITTEN = 2**20  # records that may wait for a disk that hangs, to be written at once
_HEAD_BYTES = 2**16  # room for the ids of 4,000 ranks' files


class IndexLog:
    """An index that is open for more records. `start_index` makes it.

    Attributes:
        header: what it is about.
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
    return secrets.token_bytes(GENERATION_BYTES)


def load_index(folder: OpenFolder, most_slots: int, key: TierKey | None = None) -> IndexContents | None:
    """Return the contents of a folder's index; None if there is none.

    Args:
        folder: where it is.
        most_slots: of the files that it is about.
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
        header = read_header(_read_all(descriptor, min(size, _HEAD_BYTES)), most_slots, key)
        # `is_mostly_garbage` bounds what has no effect.
        most = most_bytes(header, 2 * header.slots + _LEAST_GARBAGE + _MOST_UNWRITTEN)
        if size > most:
            raise NotAnIndex(f"it has {size} bytes, and {header.slots} slots take at most {most}")
        return read_index(_read_all(descriptor, size), most_slots, key)
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
