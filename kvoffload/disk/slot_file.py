"""A slot file: one rank's blocks on disk, in a preallocated file of slots that all have the same size.

    | header, 4 KiB | slot 0 | slot 1 | ...        a slot is a block's bytes on this rank, padded to 4 KiB

The header describes the slots, names the fingerprint of the KV, and contains the file's random id. The index names slot
files by their ids, so a file that was lost, replaced or swapped with another rank's file is noticed. The header is
written when the file is created or resized. Slots have no headers, because the index has the checksum of each slot.

Reads and writes bypass the page cache if the file system allows it. The page cache would take host memory that could
hold blocks, and under memory pressure it writes at a tenth of the disk's speed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvoffload.disk.open_folder import FINGERPRINT_BYTES, DiskInUse, OpenFolder, close_locked, lock
from kvoffload.disk.system import PAGE, aligned_buffer, round_up
from kvoffload.logs import get_logger
from kvoffload.model.errors import DiskError

ID_BYTES = 16
PIECE_BYTES = 2**20
"""The maximum number of bytes in one read or write call.

On an NVMe disk, calls of this size were 1.4 times as fast as calls of 64 KiB, and took a quarter of their CPU time.
"""

_MOST_PARTS = 1024  # the maximum number of buffers that the kernel takes in one call

_Call = Callable[[int, list[memoryview], int], int]

_MAGIC, _VERSION = b"KVOSLOTS", 2
_HEADER = struct.Struct(f"<8sII16sIIQQ16s{FINGERPRINT_BYTES}s")
_CHECKSUM = struct.Struct("<Q")

log = get_logger("disk")


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Describes the slots of a slot file. If an existing file's slots have another shape, the file is replaced.

    Args:
        rank, ranks: the rank whose bytes are in the slots, and the number of ranks.
        slot_bytes: how many bytes of a block this rank has.
        layout: a digest, 16 bytes long, of the layout of these bytes.
    """

    rank: int
    ranks: int
    slot_bytes: int
    layout: bytes

    @property
    def pitch(self) -> int:
        """Return the number of bytes from the start of a slot to the start of the next slot."""
        return round_up(self.slot_bytes)


class SlotFile:
    """An open and locked slot file. Create it with `open_slot_file`. Several threads may read and write at once.

    Attributes:
        id: the file's random id.
        slots: the number of slots in the file.
        shape: the shape of each slot.
        page_cache_reason: why I/O goes through the page cache; None if I/O is direct.
    """

    def __init__(
        self, descriptor: int, file_id: bytes, slots: int, shape: SlotShape, page_cache_reason: str | None
    ) -> None:
        self._descriptor = descriptor
        self.id = file_id
        self.slots = slots
        self.shape = shape
        self.page_cache_reason = page_cache_reason

    def write(self, slot: int, data: Sequence[memoryview]) -> None:
        """Write consecutive slots.

        Args:
            slot: the first slot.
            data: aligned memory, `shape.pitch` bytes for each slot.

        Raises:
            OSError: the disk is full, failing or gone. The contents of these slots are undefined.
        """
        self._transfer(slot, data, os.pwritev)

    def read(self, slot: int, data: Sequence[memoryview]) -> None:
        """Read consecutive slots.

        Args:
            slot: the first slot.
            data: aligned memory, `shape.pitch` bytes for each slot.

        Raises:
            OSError: the disk is failing or gone, or the file was truncated. The contents of `data` are undefined.
        """
        self._transfer(slot, data, os.preadv)

    def sync(self) -> None:
        """Wait until the disk has all written bytes.

        Raises:
            OSError: the disk is full, failing or gone.
        """
        os.fdatasync(self._descriptor)
        if self.page_cache_reason is not None:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Unlock and close the file.

        Call this only while no read or write is running, because the descriptor's number may then name another file.
        """
        close_locked(self._descriptor)

    def _transfer(self, slot: int, data: Sequence[memoryview], call: _Call) -> None:
        offset, size = self._offset(slot), sum(map(len, data))
        self._offset(slot + size // self.shape.pitch - 1)
        is_one_call = size <= PIECE_BYTES and len(data) <= _MOST_PARTS
        for parts in [list(data)] if is_one_call else _calls(data):
            while parts:
                count = call(self._descriptor, parts, offset)
                if count <= 0:
                    raise OSError(
                        errno.EIO, f"the slot file ends before slot {(offset - PAGE) // self.shape.pitch}"
                    )
                offset += count
                parts = _behind(parts, count)

    def _offset(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} is not among the {self.slots} of the file")
        return PAGE + slot * self.shape.pitch


def _calls(data: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Split memory for several calls of at most `PIECE_BYTES` each, and yield the buffers for each call."""
    parts, size = list[memoryview](), 0
    for piece in data:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            if parts and (size + len(part) > PIECE_BYTES or len(parts) == _MOST_PARTS):
                yield parts
                parts, size = [], 0
            parts.append(part)
            size += len(part)
    yield parts


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers that remain after `count` bytes were transferred."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if count else parts


def open_slot_file(folder: OpenFolder, shape: SlotShape, slots: int) -> SlotFile:
    """Open and lock a rank's slot file, and allocate its disk space.

    If the file has another shape, format or fingerprint, it is replaced by a file with a new id. A warning says so,
    except for another fingerprint: the index has that too, and says it once for all ranks. If the file has more than
    `slots` slots, the last slots are cut off.

    Args:
        folder: the folder of the engine's files. Its fingerprint goes into the file's header.
        shape: the shape of the slots. Its rank is part of the file's name.
        slots: how many slots the file will have.

    Raises:
        DiskInUse: another process has locked the file.
        DiskError: the file is not a plain file of this user, there is too little space, or the disk fails.
    """
    path = folder.path / f"slots{shape.rank}"
    try:
        descriptor, is_new = _opened(folder, path.name)
    except OSError as error:
        raise DiskError(f"the slot file {path} cannot be opened: {error.strerror}") from error
    try:
        lock(descriptor)
        return _prepare(descriptor, folder, path, shape, slots, is_new=is_new)
    except BaseException as error:
        close_locked(descriptor)
        if isinstance(error, BlockingIOError):
            raise DiskInUse(f"the slot file {path} is in use by another process") from error
        if isinstance(error, OSError):
            raise DiskError(f"the slot file {path} cannot be used: {error.strerror}") from error
        raise


def _opened(folder: OpenFolder, name: str) -> tuple[int, bool]:
    """Open or create a file. Return its descriptor, and whether the file is new."""
    try:
        return folder.open(name, os.O_RDWR), False
    except FileNotFoundError:
        return folder.open(name, os.O_RDWR | os.O_CREAT), True


def _prepare(
    descriptor: int, folder: OpenFolder, path: Path, shape: SlotShape, slots: int, *, is_new: bool
) -> SlotFile:
    buffer = aligned_buffer(PAGE)
    found = _read_header(descriptor, folder.fingerprint, shape, buffer)
    reason = _difference(buffer, folder.fingerprint, shape, os.fstat(descriptor).st_size)
    if found is None and not is_new and reason is not None:
        log.warning("slot_file_replaced", file=str(path), reason=reason, note="the blocks in it are lost")
    file_id, had = found or (secrets.token_bytes(ID_BYTES), 0)
    if slots >= had:
        _allocate(descriptor, folder, PAGE + slots * shape.pitch, keep=PAGE + had * shape.pitch if had else 0)
    if found is None or slots != had:
        buffer[:] = _header(file_id, folder.fingerprint, shape, slots)
        os.pwritev(descriptor, [buffer], 0)
        folder.sync()  # otherwise a crash could lose the file's name
    os.ftruncate(descriptor, PAGE + slots * shape.pitch)
    return SlotFile(descriptor, file_id, slots, shape, go_direct(descriptor, buffer))


def _allocate(descriptor: int, folder: OpenFolder, size: int, keep: int) -> None:
    """Allocate disk space for a file of `size` bytes. If that fails, shorten the file to `keep` bytes."""
    os.ftruncate(descriptor, keep)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.ftruncate(descriptor, keep)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        wanted = f"{size} bytes for the slot file of each rank"
        raise DiskError(f"{folder.path} has no room for {wanted}; lower disk_bytes or free space") from error


def _header(file_id: bytes, fingerprint: str, shape: SlotShape, slots: int) -> bytes:
    place = shape.rank, shape.ranks, shape.slot_bytes, slots, shape.layout
    packed = _HEADER.pack(_MAGIC, _VERSION, PAGE, file_id, *place, fingerprint.encode())
    return (packed + _CHECKSUM.pack(xxh3_64_intdigest(packed))).ljust(PAGE, b"\0")


def _read_header(
    descriptor: int, fingerprint: str, shape: SlotShape, buffer: memoryview
) -> tuple[bytes, int] | None:
    """Return a slot file's id and number of slots; None if it has another fingerprint or shape, or is too short."""
    if os.preadv(descriptor, [buffer], 0) < PAGE:
        return None
    _, _, _, file_id, _, _, _, slots, _, _ = _HEADER.unpack_from(buffer)
    if bytes(buffer) != _header(file_id, fingerprint, shape, slots):
        return None
    return (file_id, slots) if os.fstat(descriptor).st_size >= PAGE + slots * shape.pitch else None


def _difference(header: memoryview, fingerprint: str, shape: SlotShape, size: int) -> str | None:
    """Return how a file differs from a slot file of this shape; None if it is one of another fingerprint."""
    if size < PAGE:
        return f"it has {size} bytes"
    magic, version, _, _, rank, ranks, slot_bytes, slots, layout, made_for = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        return f"it begins with {magic!r}, not with {_MAGIC!r}"
    if version != _VERSION:
        return f"its format is version {version}, not {_VERSION}"
    if made_for.rstrip(b"\0") != fingerprint.encode():
        return None
    found = SlotShape(rank, ranks, slot_bytes, layout)
    if found == replace(shape, layout=layout) != shape:
        return "its blocks have other pages, or another attention backend or order of dimensions"
    if found != shape:
        return f"it has {found}, not {shape}"
    return f"its header is damaged, or its {size} bytes end before the last of {slots} slots"


def go_direct(descriptor: int, buffer: memoryview) -> str | None:
    """Switch a file to direct I/O, which bypasses the page cache. Return why direct I/O fails, or None if it works."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(descriptor, [buffer], 0)
    except OSError as error:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return f"direct I/O: {error.strerror}"
    return None
