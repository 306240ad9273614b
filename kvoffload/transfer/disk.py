"""The slot file of one rank: opening it, and copying between it and the host slots.

A job's slots are copied in the order of the file, in pieces of 1 MiB. Slots of a piece that are adjacent in the file
share one disk call.

    aligned, long pages    written and read in place
    other pages            gathered into the calling thread's buffer, or scattered from it

A call that hangs occupies its thread and that thread's buffer. Slots that the call may still change are not used again.
`TierPart.under_call` lists them: file slots for a write, host slots for a read in place. A write in place quarantines no
host slot: the bytes that it still reads there go only to file slots that are not used again. The job's other slots can
be reused. Reading in place took 0.7 times the processor time of reading through a buffer, for blocks of 1 and 4 MiB in
8 pages each.

With `verify`, a spill compares the host slots with the checksums computed when their blocks arrived. Otherwise a block
with a bit flipped in host memory would get a valid checksum on the disk. A fetch computes the checksums that later
loads and spills compare with.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Executor
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from kvoffload.disk.open_folder import LOCK_NOTE, LOCK_PAUSE_S, LOCK_TRIES, DiskInUse
from kvoffload.disk.slot_file import PIECE_BYTES, SlotFile, SlotShape, open_slot_file
from kvoffload.disk.system import PAGE, aligned_buffer
from kvoffload.disk.tier_key import are_equal
from kvoffload.logs import get_logger
from kvoffload.model.errors import DiskError, reason_of
from kvoffload.model.wire import SlotsFile, Tier
from kvoffload.transfer.blocking_calls import BlockingCalls, ErrorRow
from kvoffload.transfer.per_thread import PerThread
from kvoffload.transfer.tier_jobs import TierJobs, TierReport, find_corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.stdlib import BoundLogger

    from kvoffload.disk.folder import DiskPlace
    from kvoffload.disk.open_folder import OpenFolder
    from kvoffload.disk.tier_key import TierKey
    from kvoffload.model.wire import AnyJob
    from kvoffload.transfer.arena import Arena, Pages
    from kvoffload.transfer.blocking_calls import Call
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.ports import Clock
    from kvoffload.transfer.tier_jobs import TierPart

Pieces: TypeAlias = Sequence[memoryview]
"""The bytes of one slot, padded at the end to a whole 4 KiB page."""

THREADS = 6
"""The number of threads that copy. Four calls keep a disk busy while the other threads compute checksums."""

SYNC_PERIOD_S = 1.0
_KEEPS_LOCK = 2**16
_SHORT = 2**17
"""Size in bytes. For pieces of up to this size, getting the GIL back takes longer than hashing.

The hash library releases the GIL for pieces above `_KEEPS_LOCK`.
"""
_LONG = 2**16
"""The minimum size of a page that is copied in place, in bytes.

Blocks with shorter pages have many pages, and each page in place is a separate part of a disk call and a separate
update of the checksum.
"""

log = get_logger("disk")


class RankDisk(TierJobs):
    """The disk jobs of one rank.

    The slot file is opened on a thread, because some file systems allocate its space slowly.

    Args:
        opening: opens the slot file.
        arena: the rank's host memory.
        executor: its threads make the disk calls, which may block.
        clock: the clock for timeouts and reports.
        timeout_s: seconds after which a call counts as hanging.
        checksums: the checksums of the host slots; None if none are kept.
        key: authenticates file slots; None if they have checksums instead.
    """

    def __init__(
        self,
        opening: FileOpening,
        arena: Arena,
        executor: Executor,
        clock: Clock,
        *,
        timeout_s: float,
        checksums: Checksums | None = None,
        key: TierKey | None = None,
    ) -> None:
        shape = opening.shape
        self._opening = opening
        self._policy = ErrorRow(log.bind(rank=shape.rank))
        self._disk_mover = mover = DiskMover(shape, arena, checksums, key)
        calls = BlockingCalls(opening.open, executor, clock.monotonic, self._policy, timeout_s)
        super().__init__(Tier.DISK, calls, mover, shape.slot_bytes, clock.monotonic)
        self._is_syncing = False
        self._synced_at = clock.monotonic()
        calls.poll()  # `poll` starts the probe that opens the file.

    def take(self) -> TierReport | None:
        """Report the jobs that ended since the last call. Return None until the file is open or cannot be opened."""
        self.calls.poll()
        if self._policy.is_opening:
            return None
        self._sync()
        file = self.calls.resource
        found = None if file is None else SlotsFile(file.id, file.slots)
        return self._report(found)

    def close(self) -> None:
        """Accept no more jobs, and stop waiting for a locked file."""
        self._opening.closing.set()
        super().close()

    def _sync(self) -> None:
        """Queue a sync of the file, at most once a second and only after a write. The call has no time limit."""
        now = self._monotonic()
        if self._disk_mover.is_synced or self._is_syncing or now - self._synced_at < SYNC_PERIOD_S:
            return
        self._disk_mover.is_synced = True
        self._is_syncing = True
        self._synced_at = now
        self.calls.submit(lambda _, file: file.sync(), self._was_synced, is_write=True, limit_s=inf)

    def _was_synced(self, _: Call) -> None:
        self._is_syncing = False


class DiskMover:
    """Copies between host slots and a slot file.

    Args:
        shape: the shape of the file's slots.
        arena: the host memory.
        checksums: the checksums of the host slots; None if none are kept.
        key: authenticates file slots; None if they have checksums instead.
    """

    def __init__(
        self, shape: SlotShape, arena: Arena, checksums: Checksums | None = None, key: TierKey | None = None
    ) -> None:
        self._shape = shape
        self._arena = arena
        self._checksums = checksums
        self._key = key
        self._buffers = _SlotBuffers(arena, shape.pitch)
        self.is_synced = True
        """Whether nothing was written since the last sync was queued."""

    def positions_of(self, job: AnyJob) -> list[Sequence[int]]:
        """Return the job's positions, sorted by file slot, in groups that each fill a piece."""
        positions = sorted(range(len(job.targets)), key=job.targets.__getitem__)
        at_once = self._buffers.at_once
        return [positions[start : start + at_once] for start in range(0, len(positions), at_once)]

    def put(self, part: TierPart, call: Call, file: SlotFile) -> TierPart:
        """Write host slots to their file slots, skipping host slots whose bytes have changed."""
        job, positions = part.job, part.positions
        with self._arena.held():  # the disk may read straight from host slots
            gathered = self._buffers.gather([job.slots[position] for position in positions])
            data = dict(zip(positions, gathered, strict=True))
            sums = {
                position: self._sum(file, job.targets[position], pieces) for position, pieces in data.items()
            }
            find_corrupt(part, self._checksums, log)
            for position in part.corrupt:
                del data[position], sums[position]
            self._call(part, call, file.write, data, may_change=True)
        self.is_synced = False
        part.whole = list(data)
        part.sums = sums
        return part

    def get(self, part: TierPart, call: Call, file: SlotFile) -> TierPart:
        """Read file slots into the thread's buffer, or straight into their host slots, and verify them."""
        job, positions = part.job, part.positions
        with self._arena.held():  # the disk may write straight into host slots
            room = self._buffers.room([job.slots[position] for position in positions])
            data = dict(zip(positions, room, strict=True))
            self._call(part, call, file.read, data, may_change=self._buffers.are_in_place)
            for position, pieces in data.items():
                known = job.extra[position][self._shape.rank]
                is_right = are_equal(self._sum(file, job.targets[position], pieces), known)
                (part.whole if is_right else part.corrupt).append(position)
        return part

    def fill(self, part: TierPart) -> TierPart:
        """Copy the correct blocks from the thread's buffer into their host slots, unless they were read in place."""
        slots = part.job.slots
        with self._arena.held():
            right = set(part.whole)
            self._buffers.scatter(
                {slots[position]: index for index, position in enumerate(part.positions) if position in right}
            )
            if right and self._checksums is not None:
                self._checksums.take(*[slots[position] for position in part.whole])
        return part

    def _call(
        self,
        part: TierPart,
        call: Call,
        copy: Callable[[int, Sequence[memoryview]], None],
        data: Mapping[int, Pieces],
        *,
        may_change: bool,
    ) -> None:
        """Write or read some of a part's slots, with one disk call for each run of adjacent file slots.

        Args:
            part: the part whose slots are copied.
            call: the record of the running call.
            copy: the slot file's `write` or `read` method.
            data: the memory to copy from or to for each position, in the part's order.
            may_change: whether a hanging call may still change the job's file slots or host slots.

        Raises:
            CallEnded: the call was ended before the copy finished.
        """
        positions = list(data)
        places = [part.job.targets[position] for position in positions]
        for first, end in _runs(places):
            run = positions[first:end]
            if may_change:
                part.under_call = run
            # Check only after `under_call` is set, because the owner's thread takes the token before it reads
            # `under_call`.
            call.check()
            copy(places[first], [piece for position in run for piece in data[position]])

    def _sum(self, file: SlotFile, place: int, pieces: Pieces) -> int:
        """Return the checksum or MAC of a file slot's bytes.

        The result does not cover the block's key. The index maps slots to keys, and has a MAC of its own.
        """
        if self._key is None:
            return _checksum(pieces, self._shape.slot_bytes)
        context = b"slot " + file.id + self._shape.layout + place.to_bytes(8, "little")
        return self._key.sum(context, *_without_padding(pieces, self._shape.slot_bytes))


class FileOpening:
    """Opens a rank's slot file, on a thread that may wait.

    Args:
        place: the folder of the engine's files.
        shape: the shape of the file's slots.
        size: the maximum size of the file, in bytes.

    Attributes:
        slots: how many slots fit into `size`.
        closing: set when the file is no longer needed.
    """

    def __init__(self, place: DiskPlace, shape: SlotShape, size: int) -> None:
        self._place = place
        self.shape = shape
        self.slots = (size - PAGE) // shape.pitch
        self.closing = threading.Event()
        self._log: BoundLogger = log.bind(rank=shape.rank)

    def open(self) -> SlotFile:
        """Return the open file.

        Raises:
            CancelledError: the engine stops before its KV is identified.
            Exception: the file cannot be opened; the reason is logged.
        """
        try:
            if self.slots < 1:
                raise DiskError(f"disk_bytes gives each rank less than one block of {self.shape.pitch} bytes")
            with self._place.make_folder() as folder:
                file = self._when_unlocked(folder)
        except CancelledError:  # The engine stops before its KV is identified.
            raise
        except Exception as error:  # logged here, because the policy does not log a failed probe
            self._log.error(
                "disk_not_opened", reason=reason_of(error), note="the engine continues without the disk"
            )
            raise
        if file.page_cache_reason is not None and not self.closing.is_set():
            self._log.warning("disk_through_page_cache", reason=file.page_cache_reason)
        return file

    def _when_unlocked(self, folder: OpenFolder) -> SlotFile:
        """Open the slot file. Retry while it is locked, because workers of a killed engine may take a while to exit."""
        for number in range(LOCK_TRIES):
            try:
                return open_slot_file(folder, self.shape, self.slots)
            except DiskInUse as error:
                if not number:
                    self._log.warning("disk_in_use", reason=str(error), note=LOCK_NOTE)
                if self.closing.wait(LOCK_PAUSE_S):
                    break
        return open_slot_file(folder, self.shape, self.slots)


class _Buffer:
    """A thread's buffer for some slots, with views of each slot.

    The views are kept, because creating them takes longer than a short copy.
    """

    def __init__(self, arena: Arena, pitch: int, slots: int) -> None:
        memory = aligned_buffer(slots * pitch)
        parts = [memory[start : start + pitch] for start in range(0, slots * pitch, pitch)]
        self.pieces: list[Pieces] = [(part,) for part in parts]
        self.views: list[Sequence[Pages]] = [arena.views(part) for part in parts]


class _SlotBuffers:
    """Gathers host slots for a write, and scatters them after a read. Callable from several threads at once.

    Args:
        arena: the memory of the host slots.
        pitch: bytes of a slot in the file.

    Attributes:
        at_once: how many slots a thread's buffer has room for.
        are_in_place: whether the disk reads and writes the host slots themselves, without buffers.
    """

    def __init__(self, arena: Arena, pitch: int) -> None:
        self._arena = arena
        self.at_once = max(PIECE_BYTES // pitch, 1)
        sizes = arena.layout.page_bytes
        self.are_in_place = not any(size % PAGE for size in sizes) and min(sizes) >= _LONG
        self._buffer = PerThread(partial(_Buffer, arena, pitch, self.at_once))

    def gather(self, slots: Sequence[int]) -> Sequence[Pieces]:
        """Return the bytes of host slots, valid until the thread's next call."""
        if self.are_in_place:
            return self.room(slots)
        buffer = self._buffer.own
        for slot, views in zip(slots, buffer.views, strict=False):
            self._arena.read(slot, views)
        return buffer.pieces[: len(slots)]

    def room(self, slots: Sequence[int]) -> Sequence[Pieces]:
        """Return memory to read slots into, valid until the thread's next call. `scatter` copies it to the slots."""
        if self.are_in_place:
            return [self._arena.pages(slot) for slot in slots]
        return self._buffer.own.pieces[: len(slots)]

    def scatter(self, slots: Mapping[int, int]) -> None:
        """Copy the bytes that were read into `room` to host slots; `slots` maps each slot to its index in `room`."""
        if self.are_in_place:
            return
        views = self._buffer.own.views
        for slot, index in slots.items():
            self._arena.write(slot, views[index])


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end, as indices of `places`, of each run of adjacent file slots."""
    first = 0
    for end, place in enumerate(places[1:], 1):
        if place != places[end - 1] + 1:
            yield first, end
            first = end
    if places:
        yield first, len(places)


def _checksum(pieces: Pieces, size: int) -> int:
    """Return the checksum of a slot of `size` bytes, without its padding."""
    if size <= _KEEPS_LOCK and len(pieces) == 1:
        return xxh3_64_intdigest(pieces[0][:size])
    state = xxh3_64()
    for part in _without_padding(pieces, size):
        if len(part) <= _SHORT:
            for start in range(0, len(part), _KEEPS_LOCK):
                state.update(part[start : start + _KEEPS_LOCK])
        else:
            state.update(part)
    return state.intdigest()


def _without_padding(pieces: Pieces, size: int) -> Iterator[memoryview]:
    """Yield a slot's pieces, cut off after `size` bytes in total."""
    for piece in pieces:
        yield piece[:size]
        size -= min(len(piece), size)
