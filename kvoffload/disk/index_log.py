"""The index in its file. Everything here may wait for the disk; one thread at a time calls it, and never an engine's.

The file is only appended to. To compact it, to begin a new generation or after a change of the slot files, a new file is written beside
it, synced and renamed: the name refers to one complete index at any time.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from kvoffload.disk.index_format import (
    GENERATION_BYTES,
    Entries,
    IndexContents,
    IndexHeader,
    encode_batch,
    encode_index,
    read_index,
)
from kvoffload.disk.system import sync_folder
from kvoffload.model.disk import DiskRecord

_NAME, _NEW = "index", "index.new"
_LEAST_GARBAGE = 2**16  # records


class IndexLog:
    """An index that is open for more records. `start_index` makes it.

    Attributes:
        header: what it is about.
        records: that it has, those without effect too.
    """

    def __init__(
        self, folder: Path, header: IndexHeader, descriptor: int, end: int, batches: int, records: int
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
        contents = read_index(_read_all(self._descriptor, self._end))
        if contents is None or contents.end != self._end:
            raise OSError(errno.EIO, "the index reads otherwise than it was written")
        rewritten = start_index(self._folder, self.header, contents.entries)
        self.close()
        return rewritten

    def close(self) -> None:
        """Close the file. What was not synced is the kernel's to write."""
        os.close(self._descriptor)


def new_generation() -> bytes:
    """Return a new random generation."""
    return secrets.token_bytes(GENERATION_BYTES)


def load_index(folder: Path) -> IndexContents | None:
    """Return the contents of a folder's index; None if it is missing or its header is incomplete.

    Raises:
        OSError: the disk is failing or gone, or the name leads elsewhere.
    """
    try:
        descriptor = os.open(folder / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return read_index(_read_all(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def start_index(folder: Path, header: IndexHeader, entries: Entries | None = None) -> IndexLog:
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
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / _NEW, flags, 0o600)
    try:
        _write_all(descriptor, data, 0)
        os.fdatasync(descriptor)
        os.rename(folder / _NEW, folder / _NAME)
        sync_folder(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return IndexLog(folder, header, descriptor, len(data), batches, len(entries))


def remove_index(folder: Path) -> None:
    """Remove the index of a folder: nothing in the slot files is found again.

    Raises:
        OSError: the disk is failing or gone.
    """
    (folder / _NAME).unlink(missing_ok=True)
    sync_folder(folder)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def _read_all(descriptor: int, size: int) -> bytes:
    parts, offset = [], 0
    while offset < size and (part := os.pread(descriptor, min(size - offset, 2**26), offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
