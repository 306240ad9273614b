"""Copies between the host slots and the slot file of one rank, on threads that may wait for the disk.

    hook's thread   submit ─▶ queue of fetches ─┐                                    ┌─▶ ended ─▶ take_reports
                              queue of spills ──┴─▶ a thread: up to 1 MiB at a time ─┘

A job's slots are taken in the order of their places in the file, as many at a time as fill a piece: those in adjacent places are
one call to the disk, the others one call each.

A call that does not return costs a thread, its buffer, and what it may still change: a write its places in the file, a read of
long pages, which has no buffer, its host slots. After `timeout_s` the job ends as failed, and the report names what may change
(`JobReport.stuck`); everything else of the job is free for other blocks.

The first call that hangs stops everything: what is queued fails, and so does what comes, until the call has returned. Too many
errors in a row end it for good. Both only cost hits.

With `verify`, a spill compares the host slots with the checksums taken when their blocks arrived, or a bit that flipped in host
memory would get a fresh checksum on the disk; a fetch takes the checksums that later loads and spills are compared with.

Either thread may end a copy: the one that takes its token. The queues are touched by single operations that Python
makes whole, so the hook's thread waits for nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from kvoffload.disk.tier_key import are_equal
from kvoffload.logs import get_logger
from kvoffload.model.transfer import Direction
from kvoffload.transfer.disk_jobs import DiskCopy, OpenDiskJob
from kvoffload.transfer.slot_buffers import SlotBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from kvoffload.disk.slot_file import SlotFile
    from kvoffload.disk.tier_key import TierKey
    from kvoffload.model.disk import DiskFile
    from kvoffload.model.ids import JobId
    from kvoffload.model.transfer import DiskJob, JobReport
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.ports import Clock
    from kvoffload.transfer.slot_buffers import Pieces

THREADS = 6
"""That copy at a time: four calls keep a disk busy, while the other threads compute checksums."""

SYNC_PERIOD_S = 1.0
_MOST_ERRORS = 8  # in a row, after which the disk is not asked again
_KEEPS_LOCK, _SHORT = 2**16, 2**17
"""Bytes. Of more than the first the hash library releases the interpreter's lock, and has to get it back from other threads; for up
to the second that takes longer than the hash."""

log = get_logger("disk")


class DiskReport(NamedTuple):
    """What a rank's disk reports.

    Args:
        jobs: those that ended since the last report.
        works: copies are started.
        file: the rank's slot file; None where it could not be opened.
        is_new: something of this was not reported before.
    """

    jobs: tuple[JobReport, ...]
    works: bool
    file: DiskFile | None
    is_new: bool


class DiskCopies:
    """Spills and fetches of one rank.

    Args:
        rank: whose.
        file: of its slots; `close` closes it.
        arena: its host memory.
        executor: its threads do the copies, and may wait for the disk for ever.
        clock: time.
        timeout_s: seconds after which a call counts as never returning.
        checksums: of the host slots, None where none are kept.
        key: authenticates what places hold; None for checksums.
    """

    def __init__(
        self,
        rank: int,
        file: SlotFile,
        arena: Arena,
        executor: Executor,
        clock: Clock,
        *,
        timeout_s: float,
        checksums: Checksums | None = None,
        key: TierKey | None = None,
    ) -> None:
        self._rank = rank
        self._file = file
        self._arena = arena
        self._executor = executor
        self._clock = clock
        self._timeout_s = timeout_s
        self._checksums = checksums
        self._key = key
        self._buffers = SlotBuffers(arena, file.shape.pitch)
        self._fetches: deque[DiskCopy] = deque()
        self._spills: deque[DiskCopy] = deque()
        self._resting = [None] * THREADS  # one for each call of `_run` that may be made
        self._active: dict[int, DiskCopy] = {}  # by thread
        self._ended: deque[DiskCopy] = deque()
        self._open = 0
        self._errors = 0
        self._failure: str | None = None
        self._is_closed = False
        self._is_synced = True
        self._is_syncing = False
        self._to_close = [file]
        self._synced_at = clock.monotonic()

    # -- the hook's thread --------------------------------------------------------------------------------------

    def submit(self, jobs: Iterable[DiskJob]) -> None:
        """Queue jobs; those that will not be started end as failed."""
        now = self._clock.monotonic()
        for job in jobs:
            self._open += 1
            self._queue(OpenDiskJob(job, now))
        if not self.is_working:
            self._fail_queued()
        for _ in range(len(self._fetches) + len(self._spills)):
            if not self._may_run():
                break
            self._executor.submit(self._run)

    def cancel(self, jobs: Collection[JobId]) -> None:
        """Begin no more copies of these fetches; those that are queued end as failed when their turn comes."""
        for copy in tuple(self._fetches):
            if copy.owner.job.id in jobs:
                copy.owner.is_cancelled = True

    def poll(self) -> None:
        """Notice calls that do not return, and have the file synced when it is time. Never waits."""
        now = self._clock.monotonic()
        for copy in tuple(self._active.values()):
            if copy.called_at + self._timeout_s <= now and copy.claim():
                copy.is_stuck = True
                self._ended.append(copy)
                log.error(
                    "disk_call_hangs", rank=self._rank, job=copy.owner.job.id, timeout_s=self._timeout_s
                )
        if not self.is_working:
            self._fail_queued()
        elif not (self._is_synced or self._is_syncing) and now - self._synced_at >= SYNC_PERIOD_S:
            self._is_synced = True
            self._is_syncing = True
            self._synced_at = now
            self._executor.submit(self._sync)

    def take_reports(self) -> tuple[JobReport, ...]:
        """Return the jobs that ended since the last call."""
        reports: list[JobReport] = []
        while self._ended:
            copy = self._ended.popleft()
            copy.owner.note(copy, are_in_place=self._buffers.are_in_place)
            if not copy.owner.open_copies:
                self._open -= 1
                reports.append(copy.owner.report(self._clock.monotonic(), self._file.shape.slot_bytes))
        return tuple(reports)

    @property
    def is_working(self) -> bool:
        """Whether copies are started: no call hangs, and not too many have failed."""
        return self._failure is None and not any(copy.is_stuck for copy in tuple(self._active.values()))

    @property
    def has_work(self) -> bool:
        """Whether jobs are open or reports wait to be taken."""
        return self._open > 0

    def close(self) -> None:
        """Fail what is queued, and have the file closed when the last call in it has returned. Waits for nothing."""
        self._is_closed = True
        self._failure = self._failure or "it was closed"
        self._fail_queued()
        for copy in tuple(self._active.values()):
            copy.claim()  # a read that returns later may find the host's memory gone
        self._close_if_unused()

    # -- threads that may wait for the disk ---------------------------------------------------------------------

    def _run(self) -> None:
        """Copy until nothing is queued, fetches before any spill."""
        while True:
            while (copy := _next_of(self._fetches) or _next_of(self._spills)) is not None:
                self._copy(copy)
            self._resting.append(None)
            # After the note: `submit` queues before it looks who rests.
            if not (self._fetches or self._spills) or not self._may_run():
                return

    def _may_run(self) -> bool:
        try:
            self._resting.pop()
        except IndexError:
            return False
        return True

    def _copy(self, copy: DiskCopy) -> None:
        """Copy some slots, unless their job was cancelled."""
        if copy.owner.is_cancelled:
            self._ended.append(copy)
            return
        copy.began = self._clock.monotonic()
        thread = threading.get_ident()
        self._active[thread] = copy
        way = self._write if copy.owner.job.direction is Direction.STORE else self._read
        try:
            # After the note: `close` first says that it was called, then looks who is active.
            is_ours = not self._is_closed and way(copy)
        except Exception as error:  # whatever it is, the job ends
            is_ours = copy.claim()
            self._note_error(error)
        copy.ended = self._clock.monotonic()
        if is_ours:
            self._ended.append(copy)
        elif copy.is_stuck:
            after_s = round(copy.ended - copy.called_at, 1)
            log.warning("disk_call_returned", rank=self._rank, after_s=after_s)
        del self._active[thread]  # last: while it is there, `close` leaves the file open
        self._close_if_unused()

    def _write(self, copy: DiskCopy) -> bool:
        """Write host slots to their places; return whether the copy is this thread's to end."""
        job, positions = copy.owner.job, copy.positions
        slots = [job.slots[position] for position in positions]
        with self._arena.held() as is_open:  # the disk may take the bytes from where they lie
            if not is_open:
                return False
            data = self._buffers.gather(slots)
            sums = [
                self._sum(job.targets[position], each) for position, each in zip(positions, data, strict=True)
            ]
            # After both: what the slots hold now they held when the bytes were copied, or the checksum was taken.
            wrong = () if self._checksums is None else self._checksums.changed(slots)
            if wrong:
                copy.corrupt = [positions[index] for index in wrong]
                bad = [slots[index] for index in wrong]
                log.error("blocks_corrupt", job=job.id, blocks=len(wrong), slots=bad)
            right: Sequence[int] = range(len(slots))
            if wrong:
                right = [index for index in right if index not in wrong]
            if not self._call(copy, self._file.write, right, data):
                return False
        self._is_synced = False
        copy.sums = {positions[index]: sums[index] for index in right}
        return copy.claim()

    def _read(self, copy: DiskCopy) -> bool:
        """Read places into their host slots, where they hold what they should; return whether the copy is this thread's to end."""
        job, positions = copy.owner.job, copy.positions
        with self._arena.held() as is_open:  # the disk may put the bytes where they belong
            if not is_open:
                return False
            data = self._buffers.room([job.slots[position] for position in positions])
            if not self._call(copy, self._file.read, range(len(positions)), data):
                return False
            right = dict[int, int]()
            for index, position in enumerate(positions):
                if are_equal(self._sum(job.targets[position], data[index]), job.extra[position][self._rank]):
                    right[job.slots[position]] = index
            if not copy.claim():
                return False  # the host slots may be other blocks' by now
            copy.corrupt = [position for position in positions if job.slots[position] not in right]
            self._buffers.scatter(right)
            if right and self._checksums is not None:
                self._checksums.take(*right)
        return True

    def _call(
        self,
        copy: DiskCopy,
        call: Callable[[int, Sequence[memoryview]], None],
        indexes: Sequence[int],
        data: Sequence[Pieces],
    ) -> bool:
        """Have the disk write or read some of a copy's slots; False where the hook's thread has ended the copy meanwhile."""
        positions = [copy.positions[index] for index in indexes]
        places = [copy.owner.job.targets[position] for position in positions]
        for first, end in _runs(places):
            if not copy.enter(positions[first:end], self._clock.monotonic()):
                return False
            call(places[first], [piece for index in indexes[first:end] for piece in data[index]])
        self._errors = 0
        copy.is_done = True
        return True

    def _sum(self, place: int, pieces: Pieces) -> int:
        """Return the checksum or MAC of the bytes at a place. The index, which has a MAC too, says which block they are."""
        shape = self._file.shape
        if self._key is None:
            return _checksum(pieces, shape.slot_bytes)
        context = b"slot " + self._file.id + shape.layout + place.to_bytes(8, "little")
        return self._key.sum(context, *_without_padding(pieces, shape.slot_bytes))

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:
            self._note_error(error)
        self._is_syncing = False
        self._close_if_unused()

    def _note_error(self, error: Exception) -> None:
        """Count an error in a row; many of them end it for good."""
        self._errors += 1
        log.error("disk_call_failed", rank=self._rank, error=str(error), in_a_row=self._errors)
        if self._errors >= _MOST_ERRORS and self._failure is None:
            self._failure = f"{self._errors} calls failed in a row: {error}"
            log.error(
                "disk_stopped", rank=self._rank, reason=self._failure, note="the engine goes on without it"
            )

    def _close_if_unused(self) -> None:
        if self._is_closed and not (self._active or self._is_syncing):
            with suppress(
                IndexError, OSError
            ):  # another thread closes it, or the disk fails, which costs nothing any more
                self._to_close.pop().close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _queue(self, opened: OpenDiskJob) -> None:
        """Queue a job's copies."""
        job, at_once = opened.job, self._buffers.at_once
        queue = self._fetches if job.direction is Direction.LOAD else self._spills
        positions = sorted(range(len(job.targets)), key=job.targets.__getitem__)
        copies = [
            DiskCopy(opened, positions[start : start + at_once])
            for start in range(0, len(positions), at_once)
        ]
        opened.open_copies = len(copies)
        queue.extend(copies)

    def _fail_queued(self) -> None:
        for queue in (self._fetches, self._spills):
            while (copy := _next_of(queue)) is not None:
                if copy.claim():
                    self._ended.append(copy)


def _next_of(queue: deque[DiskCopy]) -> DiskCopy | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where in `places` those begin and end that follow each other in the file."""
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
