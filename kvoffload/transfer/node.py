"""Copies blocks from the host memory of other engines on this machine into the host slots of one rank.

    open the engine's table and the same rank's file ─▶ read the pages into our slots ─▶ look again ─▶ the slots are whole

The other engine knows nothing of it and may write its slots at any time, so what was read counts only after a second
look: the table, the file and the slot's number are still the ones that the scheduler has seen, and no engine of the
kind was reset. A block that another one has overwritten is *torn*; a block whose table, file or bytes are missing is
*gone*. Both are computed like any block that a lower tier has lost.

Files are opened for each call. That takes some tens of microseconds, and no reader keeps the memory of an engine that
has ended.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.disk.open_folder import open_folder
from kvoffload.logs import get_logger
from kvoffload.model.causes import NodeLoss
from kvoffload.model.errors import DiskError
from kvoffload.model.wire import Tier
from kvoffload.node.file_systems import open_memory_file
from kvoffload.node.neighbour import TableFile, read_numbers
from kvoffload.node.resets import last_reset
from kvoffload.node.table import NotATable
from kvoffload.transfer.blocking_calls import BlockingCalls, Breaker
from kvoffload.transfer.host_file import FileHeader, file_name, sums_name
from kvoffload.transfer.runs import region_offsets
from kvoffload.transfer.tier_jobs import TierJobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from numpy.typing import NDArray

    from kvoffload.disk.open_folder import OpenFolder
    from kvoffload.model.wire import NodeJob, NodeSlot
    from kvoffload.node.table import TableHeader
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.blocking_calls import Call
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.host_file import RankShape
    from kvoffload.transfer.ports import Clock
    from kvoffload.transfer.tier_jobs import TierPart, _OpenTierJob

THREADS = 2
_MOST_BLOCKS = 256  # the maximum number of blocks in a call
_MOST_BYTES = 32 * 2**20  # the maximum size of a call's blocks, in bytes

_KEEPS_LOCK = 2 * 2**20
_SLOW_S = 0.002  # a read of less than `_KEEPS_LOCK` takes less, unless the memory was swapped

_UNLOCKED, _LOCKED = ctypes.CDLL(None).pread, ctypes.PyDLL(None).pread
for _call in (_UNLOCKED, _LOCKED):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t)
    _call.restype = ctypes.c_ssize_t

log = get_logger("node")


class _Reader:
    """Reads from files into memory. Most reads keep the GIL.

    Getting the GIL back may take milliseconds while the engine's thread is busy, and reading a page takes
    microseconds. So the GIL is released once for every `_KEEPS_LOCK` bytes, which take less than a millisecond, and for
    every read after a slow one: the kernel may have swapped the memory.
    """

    def __init__(self) -> None:
        self._since = _KEEPS_LOCK  # how many bytes were read since the GIL was released
        self._is_slow = False

    def read(self, descriptor: int, address: int, size: int, start: int) -> int:
        """Read `size` bytes from a place in a file to an address; return how many there were, or -1 after an error."""
        self._since += size
        if self._is_slow or self._since >= _KEEPS_LOCK:
            self._since = 0
            return int(_UNLOCKED(descriptor, address, size, start))
        began = monotonic()
        count = int(_LOCKED(descriptor, address, size, start))
        self._is_slow = monotonic() - began > _SLOW_S
        return count


class Gone(Exception):
    """Raised when another engine's memory can no longer be read."""


@dataclass(frozen=True, slots=True)
class KindFolder:
    """The open folder of all engines of one kind.

    Args:
        folder: the folder.
    """

    folder: OpenFolder

    def read(self, _: str) -> None:
        """Do nothing: opening the folder was the probe."""

    def close(self) -> None:
        self.folder.close()


class _Breaker(Breaker):
    late = "node_call_returned"
    works, fails = "node_works", "node_fails"
    without = "the memory of other engines"


class RankNode(TierJobs):
    """The fetches of one rank from other engines' memory.

    Args:
        kind: the path of the folder of all engines of this kind.
        shape: the shape of this rank's slots, which other engines' slots must have too.
        arena: the rank's host memory.
        executor: its threads copy.
        clock: the clock for time limits and reports.
        timeout_s: seconds after which a copy counts as hanging.
        checksums: the checksums of the host slots; None if none are kept.
    """

    def __init__(
        self,
        kind: Path,
        shape: RankShape,
        arena: Arena,
        executor: Executor,
        clock: Clock,
        *,
        timeout_s: float,
        checksums: Checksums | None = None,
    ) -> None:
        breaker = _Breaker(log.bind(rank=shape.rank))
        calls = BlockingCalls(
            lambda: KindFolder(open_folder(kind)), executor, clock.monotonic, breaker, timeout_s
        )
        mover = NodeMover(shape, arena, checksums)
        super().__init__(Tier.NODE, calls, mover, arena.layout.slot_bytes, clock.monotonic)
        self.losses = dict.fromkeys(NodeLoss, 0)

    def _faults(self) -> tuple[int, ...]:
        return tuple(self.losses.values())

    def _part_ended(self, opened: _OpenTierJob, part: TierPart, call: Call) -> None:
        if call.was_made:
            lost = len(part.positions) - len(part.whole) - len(part.corrupt)
            self.losses[NodeLoss.TORN] += part.torn
            self.losses[NodeLoss.GONE] += lost - part.torn
        super()._part_ended(opened, part, call)


class NodeMover:
    """Copies blocks from other engines' memory. Blocks are never written there.

    Args:
        shape: the shape of this rank's slots.
        arena: the rank's host memory.
        checksums: the checksums of the host slots; None if none are kept.
    """

    def __init__(self, shape: RankShape, arena: Arena, checksums: Checksums | None = None) -> None:
        self._shape = shape
        self._arena = arena
        self._checksums = checksums
        self._at_once = max(min(_MOST_BLOCKS, _MOST_BYTES // arena.layout.slot_bytes), 1)

    def positions_of(self, job: NodeJob) -> list[Sequence[int]]:
        """Return the job's positions, sorted by slot, in groups that each have one engine's blocks."""
        targets, parts = job.targets, list[list[int]]()
        for position in sorted(range(len(targets)), key=targets.__getitem__):
            table = targets[position][:2]
            if not parts or targets[parts[-1][0]][:2] != table or len(parts[-1]) == self._at_once:
                parts.append([])
            parts[-1].append(position)
        return list(parts)

    def put(self, part: TierPart, call: Call, kind: KindFolder) -> TierPart:
        raise NotImplementedError("blocks are never written to another engine's memory")

    def get(self, part: TierPart, call: Call, kind: KindFolder) -> TierPart:
        """Read blocks straight into their host slots, and find out which of them are whole."""
        job = part.job
        targets: list[NodeSlot] = [job.targets[position] for position in part.positions]
        slots = [job.slots[position] for position in part.positions]
        # Set before the check, because the owner's thread takes the token before it reads `under_call`.
        part.under_call = part.positions
        with self._arena.held(), suppress(Gone, NotATable, DiskError, OSError):
            with _opened(kind.folder, targets[0], self._shape) as memory:
                self._read(memory, targets, slots, call)
                sums = None if self._checksums is None else memory.sums([target.slot for target in targets])
                have = memory.table.have(targets)
                memory.look_again(kind.folder)
            part.torn = have.count(False)
            whole = [place for place, has in enumerate(have) if has]
            bad = self._differing(slots, targets, sums, whole)
            part.corrupt = [part.positions[place] for place in bad]
            part.whole = [part.positions[place] for place in whole if place not in bad]
        return part

    def fill(self, part: TierPart) -> TierPart:
        """Compute the checksums of the blocks, which are in their slots already."""
        with self._arena.held():
            if part.whole and self._checksums is not None:
                self._checksums.take(*[part.job.slots[position] for position in part.whole])
        return part

    def _read(self, memory: _Memory, targets: Sequence[NodeSlot], slots: Sequence[int], call: Call) -> None:
        """Read blocks into their slots. Where slots are adjacent on both sides, their pages are read at once."""
        theirs = np.array([target.slot for target in targets])
        geometry = self._arena.geometry
        addresses = geometry.page_addresses(np.array(slots))  # [slots, regions]
        is_next = (np.diff(theirs) == 1) & (theirs[1:] % self._shape.chunk_slots != 0)
        is_next &= (np.diff(addresses, axis=0) == geometry.page).all(axis=1)
        cuts: list[int] = (np.flatnonzero(~is_next) + 1).tolist()
        for first, end in pairwise([0, *cuts, len(slots)]):
            call.check()
            memory.read(int(theirs[first]), end - first, addresses[first].tolist())

    def _differing(
        self,
        slots: Sequence[int],
        targets: Sequence[NodeSlot],
        sums: NDArray[np.uint64] | None,
        whole: list[int],
    ) -> set[int]:
        """Return which of the `whole` places have other bytes than the other engine's checksums say, and log them."""
        if self._checksums is None or sums is None or not whole:
            return set()
        own, others = [slots[place] for place in whole], [targets[place].slot for place in whole]
        wrong = self._checksums.differing(own, others, sums[whole])
        if wrong:
            bad = [others[position] for position in wrong]
            log.error("blocks_corrupt", engine=targets[0].engine, blocks=len(bad), slots=bad)
        return {whole[position] for position in wrong}


@dataclass(frozen=True, slots=True)
class _Memory:
    """The open memory of one rank of another engine.

    Args:
        folder: the engine's folder.
        table: its table.
        descriptor: the rank's file.
        header: the file's header, when it was opened.
        shape: the shape of the slots.
        reader: reads from the file.
    """

    folder: OpenFolder
    table: TableFile
    descriptor: int
    header: FileHeader
    shape: RankShape
    reader: _Reader = field(default_factory=lambda: _Reader())

    def read(self, first: int, count: int, addresses: Sequence[int]) -> None:
        """Read adjacent slots of one chunk.

        Args:
            first: the first of the slots.
            count: the number of slots.
            addresses: for each region, where the slots' pages go, one after the other.

        Raises:
            Gone: the file does not have all of these slots.
        """
        if first + count > self.header.kept:
            raise Gone("the slots were cut off")
        chunk, place = divmod(first, self.shape.chunk_slots)
        in_chunk = min(self.shape.chunk_slots, self.header.slots - chunk * self.shape.chunk_slots)
        start, sizes = self.shape.start(first), self.shape.layout.page_bytes
        starts = region_offsets(sizes, in_chunk)[:-1]
        for offset, page, address in zip(starts, sizes, addresses, strict=True):
            size = count * page
            if self.reader.read(self.descriptor, address, size, start + offset + place * page) != size:
                raise Gone("the file is cut")

    def sums(self, slots: Sequence[int]) -> NDArray[np.uint64]:
        """Return the checksums of slots.

        Raises:
            Gone: a checksum is missing.
        """
        descriptor = self.folder.open(sums_name(self.shape.rank), os.O_RDONLY)
        try:
            return read_numbers(descriptor, 0, np.array(slots))
        except ValueError:
            raise Gone("the checksums are cut") from None
        finally:
            os.close(descriptor)

    def look_again(self, kind: OpenFolder) -> None:
        """Check that table and file are still the same, and that no engine was reset.

        Raises:
            Gone: they are not.
        """
        is_same = self.table.changes() is not None and FileHeader.read(self.descriptor) == self.header
        if not is_same or last_reset(kind) != self.table.header.reset:
            raise Gone("the memory has another owner now, or was reset")


@contextmanager
def _opened(kind: OpenFolder, target: NodeSlot, shape: RankShape) -> Iterator[_Memory]:
    """Open the memory in which a block is.

    Raises:
        Gone: it belongs to another table by now, or its blocks are of another shape.
        NotATable, DiskError, OSError: it cannot be opened.
    """
    if not target.engine:
        raise Gone("no engine has the block")
    with open_folder(kind.path / target.engine) as folder:
        table = TableFile.open(folder)
        try:
            descriptor = open_memory_file(folder, file_name(shape.rank), os.O_RDONLY)
            try:
                header = FileHeader.read(descriptor)
                if header is None or not _is_meant(table, header, target, shape):
                    raise Gone("the memory has another owner now")
                yield _Memory(folder, table, descriptor, header, shape)
            finally:
                os.close(descriptor)
        finally:
            table.close()


def read_shapes(folder: OpenFolder, table: TableHeader, sharers: int) -> list[tuple[int, bytes]] | None:
    """Return the shape of the slots in each file in an engine's folder; None if a file is not the one of the table.

    Args:
        folder: the engine's folder.
        table: its table.
        sharers: how many ranks share one copy of each block, and so one file.

    Raises:
        DiskError, OSError: a file cannot be opened.
    """
    found = list[tuple[int, bytes]]()
    for rank, file_id in [*enumerate(table.files)][::sharers]:
        descriptor = open_memory_file(folder, file_name(rank), os.O_RDONLY)
        try:
            header = FileHeader.read(descriptor)
        finally:
            os.close(descriptor)
        if header is None or (header.rank, header.id) != (rank, file_id):
            return None
        found.append((header.chunk_slots, header.digest))
    return found


def _is_meant(table: TableFile, header: FileHeader, target: NodeSlot, shape: RankShape) -> bool:
    """Return whether a table is the one that the scheduler has seen, and a rank's file is about it, with such blocks."""
    files, rank = table.header.files, shape.rank
    is_named = rank < len(files) and header.id == files[rank]
    is_known = table.header.generation == target.generation
    return is_known and is_named and header[:2] == (rank, shape.chunk_slots) and header.digest == shape.digest
