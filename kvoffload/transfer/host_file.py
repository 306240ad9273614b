"""One rank's host memory in a file, which the next process of the same rank finds, or which several ranks share.

    | header, a page: magic, shape, id, checksum | chunk 0 | chunk 1 | ...     sums0: checksums of the slots, with `verify`

The file has the arena's chunks, each at a fixed place, so that the bytes of a slot stay where they are if the next
process has more or fewer slots. Only the last chunk can have fewer slots than the others; if their number changes, its
bytes are moved.

The table of host slots has the ids of the files that it is about. A process that opens the file gives it a new id before
the first report to its scheduler's process, because no copy starts before that. So a table counts only until the next
engine steps, and then only if that engine's scheduler takes the table over. Other engines read a file with
`kvoffload.transfer.node`, as long as it has the id that its table names.

Of ranks that share one copy, the first one opens the file, and passes it to the others. Without `host_path` the file has
no name, and ends with its processes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvoffload.disk.system import PAGE
from kvoffload.logs import get_logger
from kvoffload.model.errors import ConfigError, DiskError, HostMemoryError
from kvoffload.node.file_systems import open_memory_file, place_memory_file, remove_memory
from kvoffload.node.table import ID_BYTES
from kvoffload.transfer.layout import digest_of
from kvoffload.transfer.runs import region_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvoffload.disk.open_folder import OpenFolder
    from kvoffload.node.folder import Claim
    from kvoffload.transfer.layout import DeviceLayout

_MAGIC, _VERSION = b"KVOARENA", 2
_HEADER = struct.Struct(f"<8sIIQQQQ16s{ID_BYTES}s")  # magic, version, then the fields of `FileHeader`
_SUM = struct.Struct("<Q")
_NO_ID = bytes(ID_BYTES)
# MADV_POPULATE_READ and MADV_POPULATE_WRITE, which Python does not name. Of memory that is there, READ maps several pages
# at a time, and lets them be written too: it took 0.4 of the time.
_READ, _WRITE = 22, 23
# What says so: `posix_fallocate`, and MADV_POPULATE_WRITE.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EFAULT, errno.ENOMEM)

# So many ranks and engines may take a chunk at the same time. If one found the file system full after half of a chunk, it would
# leave no room for the table, and for what the next start writes.
_AT_ONCE = 16

log = get_logger("host")


@dataclass(frozen=True, slots=True)
class RankShape:
    """What must be equal for one process to use the bytes of another.

    Args:
        rank: the rank; the first one of those that share the file.
        layout: the layout of the rank's blocks.
        chunk_slots: how many slots a chunk has.
        verify: the setting `verify`, on which the checksums depend.
        page: bytes of a page of the file. Header and chunks begin with a page, so that chunks are pinned separately.
    """

    rank: int
    layout: DeviceLayout
    chunk_slots: int
    verify: str = "off"
    page: int = PAGE

    @property
    def digest(self) -> bytes:
        return xxh3_128_digest(digest_of(self.layout) + f"{self.verify} {self.page}".encode())

    @property
    def pitch(self) -> int:
        """Return the number of bytes from the start of a chunk to the start of the next one."""
        return self.whole_pages(self.chunk_bytes(self.chunk_slots))

    def chunk_bytes(self, slots: int) -> int:
        return region_offsets(self.layout.page_bytes, slots)[-1]

    def file_bytes(self, slots: int) -> int:
        """Return the size of a file with this number of slots."""
        return self.start(slots) + self.whole_pages(self.chunk_bytes(slots % self.chunk_slots))

    def start(self, slot: int) -> int:
        """Return where a slot's chunk begins."""
        return self.page + slot // self.chunk_slots * self.pitch

    def whole_pages(self, size: int) -> int:
        return -(-size // self.page) * self.page


class _Found(msgspec.Struct, frozen=True):
    """What the rank that opened a file passes to the ranks that share it. See `HostFile`."""

    digest: bytes
    slots: int
    id: bytes
    previous: bytes
    kept: int
    end: int


class HostFile:
    """An open file of one rank. Create it with `open_host_file`, `make_host_file` or `shared_host_file`.

    Attributes:
        slots: how many slots the rank wants.
        kept: how many slots, from the first on, have the bytes that the earlier process left.
        id: the file's id from `begin` on.
        previous: the id that the file had, under which an earlier process's table knows it; empty for a new file.
        sums: with `verify`, the checksum of each slot; None without.
        files: the descriptors to pass to ranks that share the file.
    """

    def __init__(self, shape: RankShape, found: _Found, files: list[int], claim: Claim | None) -> None:
        self.shape = shape
        self.slots = found.slots
        self.kept = found.kept
        self.id = found.id
        self.previous = found.previous
        self._found = found
        self._claim = claim
        self.files = files
        self._memory = mmap.mmap(files[0], shape.file_bytes(found.slots))
        advise(self._memory)
        sums = mmap.mmap(files[1], 8 * found.slots) if len(files) > 1 else None
        self.sums: NDArray[np.uint64] | None = None if sums is None else np.frombuffer(sums, np.uint64)
        self._has_begun = False

    @property
    def has_name(self) -> bool:
        """Return whether the next engine can find the file."""
        return self._claim is not None

    @property
    def is_set_aside(self) -> bool:
        """Return whether the system has set the memory aside for this file already, in a pool of huge pages."""
        return self.shape.page > PAGE

    @property
    def text(self) -> bytes:
        """Return the text to pass to ranks that share the file."""
        return msgspec.msgpack.encode(self._found)

    def begin(self) -> None:
        """Give the file its new id: copies may change its bytes from now on. Calling it again does nothing."""
        if not self._has_begun:
            header = _header(self.shape, self.slots, self.slots, self.id).packed(self.files[0])
            self._memory[: len(header)] = header
            self._has_begun = True

    def take(self, first: int, size: int) -> int:
        """Make the memory of a chunk present; return its address.

        Args:
            first: the chunk's first slot.
            size: the chunk's bytes.

        Raises:
            HostMemoryError: the file system is full.
        """
        start = self.shape.start(first)
        size = self.shape.whole_pages(size)
        is_there = self.has(first, size)
        try:
            if not is_there and not _has_room(self.files[0], _AT_ONCE * size):
                os.posix_fallocate(self.files[0], start, size)  # all or nothing, but never of huge pages
            _populate(self._memory, self.files[0], start, size, _READ if is_there else _WRITE)
        except OSError as error:
            if error.errno not in _FULL:
                raise HostMemoryError(f"the file of host memory cannot grow: {error.strerror}") from error
            where = "shared memory" if self._claim is None else "the file system of host memory"
            raise HostMemoryError(
                f"{where} has no room for {size} more bytes: make it larger, or lower host_bytes"
            ) from error
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + start

    def has(self, first: int, size: int) -> bool:
        """Return whether the memory of a chunk is there, left by an earlier process."""
        return self.shape.start(first) + size <= self._found.end

    def remove(self) -> None:
        """Remove the file's name, if it has one. The memory stays until no process maps it."""
        if self._claim is not None:
            for name in (file_name(self.shape.rank), sums_name(self.shape.rank)):
                remove_memory(self._claim.folder, name)

    def close(self, *, may_still_write: bool) -> None:
        """Close the file and unlock the folder. Mapped memory stays until its last user ends.

        Args:
            may_still_write: whether copies of this process may still write to the memory.
        """
        for descriptor in self.files:
            os.close(descriptor)
        if self._claim is not None:
            self._claim.close(may_still_write=may_still_write)


class FileHeader(NamedTuple):
    """What a rank's file says about itself.

    Args:
        rank: the rank.
        chunk_slots: how many slots a chunk has.
        slots: the number of slots.
        kept: how many slots, from the first on, have the bytes of the process that gave the file its id.
        moves: how often slots have changed their places since then.
        digest: `RankShape.digest`.
        id: the file's id.
    """

    rank: int
    chunk_slots: int
    slots: int
    kept: int
    moves: int
    digest: bytes
    id: bytes

    @classmethod
    def read(cls, descriptor: int) -> FileHeader | None:
        """Return the header of an open file; None if it is damaged or the file is a copy."""
        data = os.pread(descriptor, _HEADER.size + _SUM.size, 0)
        if len(data) < _HEADER.size + _SUM.size:
            return None
        found = cls(*_HEADER.unpack_from(data)[2:])
        return found if found.packed(descriptor).startswith(data) else None

    def packed(self, descriptor: int) -> bytes:
        """Return the header's page in this file. Its checksum covers the file's identity too.

        A copy of a folder in which an engine runs can have a table and files of different moments, so none of it counts.
        """
        found = os.fstat(descriptor)
        packed = _HEADER.pack(_MAGIC, _VERSION, *self)
        checksum = xxh3_64_intdigest(b"%b%d %d" % (packed, found.st_dev, found.st_ino))
        return (packed + _SUM.pack(checksum)).ljust(PAGE, b"\0")


def open_host_file(claim: Claim, shape: RankShape, slots: int, pages: Path | None = None) -> HostFile:
    """Open a rank's file in its engine's folder, which `HostFile.close` unlocks. Create a missing file.

    A file for other blocks is replaced, and a line in the log says so.

    Args:
        claim: the engine's folder.
        shape: the shape of the rank's slots.
        slots: how many slots the rank wants.
        pages: the folder on a hugetlbfs that has the file itself; None for a file in the engine's folder.

    Raises:
        ConfigError: the file cannot be used.
    """
    folder, name, files = claim.folder, file_name(shape.rank), list[int]()
    try:
        with closed_on_error(files):
            return _opened(claim, shape, slots, pages, files)
    except (OSError, DiskError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        where = f"host_path: {folder.path / name}" if pages is None else f"host_hugetlbfs: a file in {pages}"
        raise ConfigError([f"{where} cannot be used: {reason}"]) from error


def _opened(claim: Claim, shape: RankShape, slots: int, pages: Path | None, files: list[int]) -> HostFile:
    """Open a rank's file and its checksums, and add their descriptors to `files`."""
    folder, name = claim.folder, file_name(shape.rank)
    if place_memory_file(folder, name, pages):
        reason = "host_hugetlbfs is another, or the folder is a copy"
        log.warning("host_memory_replaced", file=str(folder.path / name), reason=reason)
    descriptor = open_memory_file(folder, name, os.O_RDWR | os.O_CREAT)
    files.append(descriptor)
    found = _read_header(folder, name, descriptor, shape)
    if found is None:
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, shape.page)
    # until the bytes are in their places, no table counts
    _write(descriptor, shape.page, 0, _header(shape, 0, 0, _NO_ID).packed(descriptor))
    kept, moves, previous = 0, 0, b""
    if found is not None:
        kept, moves, previous = min(found.kept, slots), found.moves + (found.slots != slots), found.id
        _move_last_chunk(descriptor, shape, found.slots, slots)
    os.ftruncate(descriptor, shape.file_bytes(slots))
    end = _end(descriptor, shape.page)
    if shape.verify != "off":
        files.append(folder.open(sums_name(shape.rank), os.O_RDWR | os.O_CREAT))
        os.posix_fallocate(files[1], 0, max(8 * slots, os.fstat(files[1]).st_size))
    header = _header(shape, slots, kept, previous or _NO_ID, moves)
    _write(descriptor, shape.page, 0, header.packed(descriptor))
    return HostFile(shape, _Found(shape.digest, slots, _new_id(), previous, kept, end), files, claim)


def make_host_file(shape: RankShape, slots: int) -> HostFile:
    """Return a new file without a name, for ranks that share it."""
    files = [os.memfd_create("kvoffload")]
    with closed_on_error(files):
        os.ftruncate(files[0], shape.file_bytes(slots))
        if shape.verify != "off":
            files.append(os.memfd_create("kvoffload-sums"))
            os.ftruncate(files[1], 8 * slots)
        return HostFile(shape, _Found(shape.digest, slots, _new_id(), b"", 0, 0), files, None)


def shared_host_file(shape: RankShape, text: bytes, files: list[int], claim: Claim | None) -> HostFile:
    """Return the file that another rank has opened and passed here. After an error, `files` are closed.

    Raises:
        ConfigError: its slots have another layout than this rank's.
    """
    with closed_on_error(files):
        found = msgspec.msgpack.decode(text, type=_Found)
        if found.digest != shape.digest:
            problem = (
                "host_share: this rank's KV cache has another layout than that of the rank whose host memory it shares; set "
                "host_share to false"
            )
            raise ConfigError([problem])
        return HostFile(shape, found, files, claim)


@contextmanager
def closed_on_error(files: Sequence[int]) -> Iterator[None]:
    """Close open files if an error ends the block."""
    try:
        yield
    except BaseException:
        for descriptor in files:
            os.close(descriptor)
        raise


def _new_id() -> bytes:
    return secrets.token_bytes(ID_BYTES)


def file_name(rank: int) -> str:
    return f"rank{rank}"


def sums_name(rank: int) -> str:
    return f"sums{rank}"


def _header(shape: RankShape, slots: int, kept: int, file_id: bytes, moves: int = 0) -> FileHeader:
    return FileHeader(shape.rank, shape.chunk_slots, slots, kept, moves, shape.digest, file_id)


def _read_header(folder: OpenFolder, name: str, descriptor: int, shape: RankShape) -> FileHeader | None:
    """Return a file's header; None if the next process must not use the bytes. Log why."""
    size = os.fstat(descriptor).st_size
    if not size:
        return None
    found = FileHeader.read(descriptor)
    is_whole = found is not None and size >= shape.file_bytes(found.slots)
    if found is not None and is_whole and found == _header(shape, *found[2:4], found.id, found.moves):
        return found if found.id != _NO_ID else None
    path = str(folder.path / name)
    log.warning(
        "host_memory_replaced",
        file=path,
        reason="it is of other blocks, another verify, damaged, cut or a copy",
    )
    return None


def _move_last_chunk(descriptor: int, shape: RankShape, had: int, wanted: int) -> None:
    """Move the bytes of the last chunk that both processes have, if its number of slots changes.

    They move to new pages, because the device of a killed process may still write where a slot was, where another is now.
    """
    chunk = (min(had, wanted) - 1) // shape.chunk_slots
    before, after = [min(shape.chunk_slots, slots - chunk * shape.chunk_slots) for slots in (had, wanted)]
    if before == after:
        return
    start, sizes = shape.start(chunk * shape.chunk_slots), shape.layout.page_bytes
    data = os.pread(descriptor, shape.chunk_bytes(before), start).ljust(shape.chunk_bytes(before), b"\0")
    sources, targets = region_offsets(sizes, before), region_offsets(sizes, after)
    moved = bytearray(targets[-1])
    for size, (source, _), (target, _) in zip(sizes, pairwise(sources), pairwise(targets), strict=True):
        length = min(before, after) * size
        moved[target : target + length] = data[source : source + length]
    os.ftruncate(descriptor, start)
    os.ftruncate(descriptor, start + shape.whole_pages(len(moved)))
    _write(descriptor, shape.page, start, moved)


def _write(descriptor: int, page: int, start: int, data: bytes | bytearray) -> None:
    """Write to pages of a file, which has them. A hugetlbfs accepts no write(2)."""
    # Where there is no room, this raises an error, and a write to mapped memory would end the process.
    os.posix_fallocate(descriptor, start, len(data))
    with mmap.mmap(descriptor, -(-len(data) // page) * page, offset=start) as memory:
        memory[: len(data)] = data


def _end(descriptor: int, page: int) -> int:
    """Return where the memory ends that is there. A hugetlbfs finds no holes, but chunks become present in order."""
    if page == PAGE:
        return os.lseek(descriptor, 0, os.SEEK_HOLE)
    return 512 * os.fstat(descriptor).st_blocks


def advise(memory: mmap.mmap) -> None:
    """Ask for huge pages, and exclude the memory from forks and core dumps. A refusal does no harm.

    With huge pages, scattered copies need fewer address translations. Without `MADV_DONTFORK`, each fork would copy the
    pinned pages.

    khugepaged scans this memory while it holds the lock of the process's memory map. `MADV_COLLAPSE` would avoid the
    scans, but holds that lock while it waits for a kernel thread on every processor, which took up to 6 s while vLLM's
    threads were spinning.
    """
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
        with suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, name))


def _has_room(descriptor: int, size: int) -> bool:
    """Return whether the file system of a file has room for more bytes, as far as it has a limit."""
    found = os.fstatvfs(descriptor)
    return not found.f_blocks or found.f_bavail * found.f_frsize >= size


def _populate(memory: mmap.mmap, descriptor: int, start: int, size: int, how: int) -> None:
    """Make every page of a file present, and map it, so that no copy waits for a page fault. The pages' bytes stay.

    Raises:
        OSError: the file system is full.
    """
    try:
        memory.madvise(how, start, size)
        return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Linux before 5.14: a touch of a page for which there is no room would end the process.
    os.posix_fallocate(descriptor, start, size)
    view = np.frombuffer(memory, np.uint8, size, start)[::PAGE]
    view |= 0
