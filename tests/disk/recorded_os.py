"""Records the system calls on the disk tier's files, and simulates what a power failure leaves.

Writes that were not synced may be lost, torn at any sector, or reordered within a file. File systems journal
changes of names, so name changes stay in order, but the last of them may be lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

_SECTOR = 512


@dataclass(slots=True)
class Inode:
    """A file's durable bytes, and the changes that are not yet durable."""

    durable: bytearray = field(default_factory=bytearray)
    # Each change is an offset and data. Without data, the offset is the file's new size.
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)


class Disk:
    """The durable files, by inode and name."""

    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        self.names: dict[str, int] = {}
        # Each change is a new name, an old name and an inode.
        self.pending_names: list[tuple[str, str | None, int]] = []

    def left(self, random: Random, folder: Path) -> None:
        """Write into a folder the files that a power failure at this moment can leave."""
        names = dict(self.names)
        for new, old, inode in self.pending_names[: random.randint(0, len(self.pending_names))]:
            names[new] = inode
            names.pop(old or "", None)
        for name, inode in names.items():
            (folder / name).write_bytes(_left_of(self.inodes[inode], random))


def _left_of(inode: Inode, random: Random) -> bytes:
    data = bytearray(inode.durable)
    pending = [change for change in inode.pending if random.random() < 0.5]
    if random.random() < 0.5:
        random.shuffle(pending)
    for offset, new in pending:
        if new is None:
            _resize(data, offset)
            continue
        is_torn = random.random() < 0.4
        for start in range(0, len(new), _SECTOR):
            if not is_torn or random.random() < 0.5:
                _put(data, offset + start, new[start : start + _SECTOR])
    return bytes(data)


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _put(data: bytearray, offset: int, new: bytes) -> None:
    if len(data) < offset + len(new):
        _resize(data, offset + len(new))
    data[offset : offset + len(new)] = new


class RecordedOs:
    """Stands in for the module `os`: passes calls on, and tracks which writes are durable.

    Args:
        disk: the tracked disk.
        happened: called after each call that changes a file or name.
    """

    def __init__(self, disk: Disk, happened: Callable[[], None]) -> None:
        self._disk = disk
        self._happened = happened

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the module has
        return getattr(os, name)

    def open(self, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        try:
            was_there = bool(os.stat(path, dir_fd=dir_fd, follow_symlinks=False))
        except FileNotFoundError:
            was_there = False
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            number = os.fstat(descriptor).st_ino
            if not was_there:
                self._disk.inodes[number] = Inode()
                self._disk.pending_names.append((Path(path).name, None, number))
            self._happened()
        return descriptor

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._inode(descriptor).pending.append((offset, bytes(data)))
        self._happened()
        return os.pwrite(descriptor, data, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._inode(descriptor).pending.append((offset, b"".join(map(bytes, buffers))))
        self._happened()
        return os.pwritev(descriptor, buffers, offset)

    def ftruncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        if os.fstat(descriptor).st_ino in self._disk.inodes:
            self._inode(descriptor).pending.append((size, None))

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        os.posix_fallocate(descriptor, offset, size)
        self._inode(descriptor).pending.append((os.fstat(descriptor).st_size, None))

    def fdatasync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)
        self._synced(self._inode(descriptor))

    def fsync(self, descriptor: int) -> None:
        inode = self._disk.inodes.get(os.fstat(descriptor).st_ino)
        if inode is not None:
            os.fsync(descriptor)
            self._synced(inode)
            return
        for new, old, number in self._disk.pending_names:  # All files are in one folder.
            self._disk.names[new] = number
            self._disk.names.pop(old or "", None)
        self._disk.pending_names = []
        self._happened()

    def rename(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        number = os.stat(old, dir_fd=src_dir_fd).st_ino
        os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._disk.pending_names.append((new, old, number))
        self._happened()

    def _inode(self, descriptor: int) -> Inode:
        return self._disk.inodes[os.fstat(descriptor).st_ino]

    def _synced(self, inode: Inode) -> None:
        for offset, new in inode.pending:
            if new is None:
                _resize(inode.durable, offset)
            else:
                _put(inode.durable, offset, new)
        inode.pending = []
        self._happened()
