"""The slot file of one rank: how it is opened, and what a call that copies between it and the host slots does.

A job's slots are copied in the order of the file, in pieces of 1 MiB. Slots of a piece that are adjacent in the file share one call to
the disk.

    pages that are aligned and long    written and read in place
    other pages                        gathered in, or scattered from, the calling thread's buffer

A call that hangs occupies a thread and its buffer. What it may still change is not used again, and `Part.under_call` names it: for a
write the places in the file, for a read in place the host slots. A write in place quarantines no host slot, because what it still reads
there goes to a place that is not used again. The job's other slots are free for other blocks. In place, blocks of 1 and 4 MiB in 8 pages
were fetched with 0.7 of the processor time.

With `verify`, a spill compares the host slots with the checksums taken when their blocks arrived: otherwise a bit that flipped
in host memory would get a valid checksum on the disk. A fetch takes the checksums that later loads and spills are compared with.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Executor
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from kvoffload.disk.open_folder import LOCK_PAUSE_S, LOCK_TRIES
from kvoffload.disk.slot_file import PIECE_BYTES, SlotFile, SlotFileInUse, SlotShape, open_slot_file
from kvoffload.disk.system import PAGE, aligned_buffer
from kvoffload.disk.tier_key import are_equal
from kvoffload.logs import get_logger
from kvoffload.model.errors import DiskError, reason_of
from kvoffload.model.wire import DiskFile
from kvoffload.transfer.blocking_calls import BlockingCalls, ErrorRow
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
    from kvoffload.transfer.tier_jobs import Part

Pieces: TypeAlias = Sequence[memoryview]
"""A slot's bytes; the end of the last piece is padding to a whole page."""

THREADS = 6
"""Threads that copy: four calls keep a disk busy while the other threads compute checksums."""

SYNC_PERIOD_S = 1.0
_KEEPS_LOCK = 2**16
_SHORT = 2**17
"""Bytes. For more than the first, the hash library releases the interpreter's lock and has to get it back from other threads. Up to the
second, that takes longer than the hash."""
_LONG = 2**16
"""Least bytes of a long page. Shorter pages are many, and each is a part of a call to the disk and an update of a checksum."""

log = get_logger("disk")


class RankDisk(TierJobs):
    """The disk of one rank. A thread opens the file, so that no hook waits for a file system that allocates slowly.

    Args:
        opening: opens the file.
        arena: the rank's host memory.
        executor: threads that may wait for the disk.
        clock: time.
        timeout_s: seconds after which a call counts as hanging.
        checksums: of the host slots, None where none are kept.
        key: authenticates slots; None for checksums.
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
        self._copies = mover = DiskMover(shape, arena, checksums, key)
        calls = BlockingCalls(opening.open, executor, clock.monotonic, self._policy, timeout_s)
        super().__init__(calls, mover, shape.slot_bytes, clock.monotonic)
        self._is_syncing = False
        self._synced_at = clock.monotonic()
        calls.poll()  # which opens the file

    def take(self) -> TierReport | None:
        """Return what ended since the last call, None before it is known whether the file can be opened."""
        self.calls.poll()
        if self._policy.is_opening:
            return None
        self._sync()
        file = self.calls.resource
        found = None if file is None else DiskFile(file.id, file.slots)
        return self._report(found)

    def close(self) -> None:
        """Take no more jobs, and open no file."""
        self._opening.closing.set()
        super().close()

    def _sync(self) -> None:
        """Have the file synced a second after the last time, if something was written. The call has no time limit."""
        now = self._monotonic()
        if self._copies.is_synced or self._is_syncing or now - self._synced_at < SYNC_PERIOD_S:
            return
        self._copies.is_synced = True
        self._is_syncing = True
        self._synced_at = now
        self.calls.submit(lambda _, file: file.sync(), self._was_synced, is_write=True, limit_s=inf)

    def _was_synced(self, _: Call) -> None:
        self._is_syncing = False


class DiskMover:
    """Copies between host slots and a slot file.

    Args:
        shape: of the file's slots.
        arena: the host memory.
        checksums: of the host slots, None where none are kept.
        key: authenticates what places hold; None for checksums.
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
        """Nothing was written since this was last set."""

    def positions_of(self, job: AnyJob) -> list[Sequence[int]]:
        """Return as many positions at a time as fill a piece, in the order of their places in the file."""
        positions = sorted(range(len(job.targets)), key=job.targets.__getitem__)
        at_once = self._buffers.at_once
        return [positions[start : start + at_once] for start in range(0, len(positions), at_once)]

    def put(self, part: Part, call: Call, file: SlotFile) -> Part:
        """Write host slots to their places, but for those that do not hold what was stored there."""
        job, positions = part.job, part.positions
        with self._arena.held():  # the disk may take the bytes from where they lie
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

    def get(self, part: Part, call: Call, file: SlotFile) -> Part:
        """Read places into the thread's buffer, or into their host slots, and check them."""
        job, positions = part.job, part.positions
        with self._arena.held():  # the disk may put the bytes where they belong
            room = self._buffers.room([job.slots[position] for position in positions])
            data = dict(zip(positions, room, strict=True))
            self._call(part, call, file.read, data, may_change=self._buffers.are_in_place)
            for position, pieces in data.items():
                known = job.extra[position][self._shape.rank]
                is_right = are_equal(self._sum(file, job.targets[position], pieces), known)
                (part.whole if is_right else part.corrupt).append(position)
        return part

    def fill(self, part: Part) -> Part:
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
        part: Part,
        call: Call,
        copy: Callable[[int, Sequence[memoryview]], None],
        data: Mapping[int, Pieces],
        *,
        may_change: bool,
    ) -> None:
        """Have the disk write or read some of a part's slots.

        Args:
            part: the part.
            call: the call that this is part of.
            copy: writes or reads.
            data: the bytes of these slots by position, in the order of the part.
            may_change: whether a call that hangs may still change the job's places or host slots.

        Raises:
            CallEnded: the call was ended meanwhile.
        """
        positions = list(data)
        places = [part.job.targets[position] for position in positions]
        for first, end in _runs(places):
            run = positions[first:end]
            if may_change:
                part.under_call = run
            # After the note: the owner's thread takes the token before it reads which positions the call may change.
            call.check()
            copy(places[first], [piece for position in run for piece in data[position]])

    def _sum(self, file: SlotFile, place: int, pieces: Pieces) -> int:
        """Return the checksum or MAC of the bytes at a place. The index, which has a MAC too, says which block they are."""
        if self._key is None:
            return _checksum(pieces, self._shape.slot_bytes)
        context = b"slot " + file.id + self._shape.layout + place.to_bytes(8, "little")
        return self._key.sum(context, *_without_padding(pieces, self._shape.slot_bytes))


class FileOpening:
    """Opens a rank's slot file, on a thread that may wait.

    Args:
        place: where the file belongs.
        shape: of its slots.
        size: bytes that it may have.

    Attributes:
        slots: slots that it may have.
        closing: set when the file is not wanted any more.
    """

    def __init__(self, place: DiskPlace, shape: SlotShape, size: int) -> None:
        self._place = place
        self.shape = shape
        self.slots = (size - PAGE) // shape.pitch
        self.closing = threading.Event()
        self._log: BoundLogger = log.bind(rank=shape.rank)

    def open(self) -> SlotFile:
        """Return the file.

        Raises:
            Exception: it cannot be opened; that is logged.
        """
        try:
            if self.slots < 1:
                raise DiskError(f"disk_bytes gives each rank less than one block of {self.shape.pitch} bytes")
            with self._place.make_folder() as folder:
                file = self._when_unlocked(folder)
        except CancelledError:  # the engine stops before its KV is identified
            raise
        except Exception as error:  # or the other ranks would wait for this one
            self._log.error("disk_not_opened", reason=reason_of(error), note="the engine goes on without it")
            raise
        if file.page_cache_reason is not None and not self.closing.is_set():
            self._log.warning("disk_through_page_cache", reason=file.page_cache_reason)
        return file

    def _when_unlocked(self, folder: OpenFolder) -> SlotFile:
        """Open the slot file. Workers of a killed engine keep theirs locked until they notice, so a locked one is tried again."""
        for number in range(LOCK_TRIES):
            try:
                return open_slot_file(folder, self.shape, self.slots)
            except SlotFileInUse as error:
                if not number:
                    note = "it is tried again for a minute"
                    self._log.warning("disk_in_use", reason=str(error), note=note)
                if self.closing.wait(LOCK_PAUSE_S):
                    break
        return open_slot_file(folder, self.shape, self.slots)


class _Buffer:
    """A thread's memory for some slots, and its views for copies: to make them each time took longer than short copies."""

    def __init__(self, arena: Arena, pitch: int, slots: int) -> None:
        memory = aligned_buffer(slots * pitch)
        parts = [memory[start : start + pitch] for start in range(0, slots * pitch, pitch)]
        self.pieces: list[Pieces] = [(part,) for part in parts]
        self.views: list[Sequence[Pages]] = [arena.views(part) for part in parts]


class _SlotBuffers:
    """Gathers slots for a write, and scatters them after a read. Callable from several threads at once.

    Args:
        arena: where the slots are.
        pitch: bytes of a slot on the disk.

    Attributes:
        at_once: slots that a thread's buffer has room for.
        are_in_place: no buffers are used; reads go into the host slots themselves.
    """

    def __init__(self, arena: Arena, pitch: int) -> None:
        self._arena = arena
        self._pitch = pitch
        self.at_once = max(PIECE_BYTES // pitch, 1)
        sizes = arena.layout.page_bytes
        self.are_in_place = not any(size % PAGE for size in sizes) and min(sizes) >= _LONG
        self._threads = threading.local()

    def gather(self, slots: Sequence[int]) -> Sequence[Pieces]:
        """Return the bytes of slots, valid until the thread's next call."""
        if self.are_in_place:
            return self.room(slots)
        buffer = self._buffer()
        for slot, views in zip(slots, buffer.views, strict=False):
            self._arena.read(slot, views)
        return buffer.pieces[: len(slots)]

    def room(self, slots: Sequence[int]) -> Sequence[Pieces]:
        """Return memory to read slots into, valid until the thread's next call; `scatter` brings it to them."""
        if self.are_in_place:
            return [self._arena.pages(slot) for slot in slots]
        return self._buffer().pieces[: len(slots)]

    def scatter(self, slots: Mapping[int, int]) -> None:
        """Copy what was read into `room` to host slots, each given with its index in `room`."""
        if self.are_in_place:
            return
        views = self._buffer().views
        for slot, index in slots.items():
            self._arena.write(slot, views[index])

    def _buffer(self) -> _Buffer:
        buffer: _Buffer | None = getattr(self._threads, "buffer", None)
        if buffer is None:
            buffer = self._threads.buffer = _Buffer(self._arena, self._pitch, self.at_once)
        return buffer


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end, in `places`, of those that are adjacent in the file."""
    first = 0
    for end, place in enumerate(places[1:], 1):
        if place != places[end - 1] + 1:
            yield first, end
            first = end
    if places:
        yield first, len(places)


def _checksum(pieces: Pieces, size: int) -> int:
    """Return the checksum of a slot of so many bytes."""
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
    """Yield the pieces of a slot of so many bytes."""
    for piece in pieces:
        yield piece[:size]
        size -= min(len(piece), size)
