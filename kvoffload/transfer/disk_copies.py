"""Copies between the host slots and the slot file of one rank, on threads that may wait for the disk.

    hook's thread   submit ─▶ queue of fetches ─┐                              ┌─▶ ended ─▶ take_reports
                              queue of spills ──┴─▶ a thread: one slot at a time ─┘

A slot goes through a buffer of the thread's. Direct I/O needs it, as a page of the engine's may lie anywhere; and a call that
does not return has nothing but this buffer and its place in the file under it. So a hanging disk costs a thread and a buffer:
after `timeout_s` the slot's job ends as failed, and the host slot is free for anything else. A write that hangs may still change
its place in the file; the report names that (`JobReport.stuck`).

The first call that hangs stops everything: what is queued fails, and so does what comes, until the call has returned. Too many
errors in a row end it for good. Both only cost hits.

With `verify`, a spill compares the host slot with the checksum taken when its block arrived, or a bit that flipped in host
memory would get a fresh checksum on the disk; a fetch takes the checksum that later loads and spills are compared with.

Either thread may end a slot's copy: the one that takes its token. The queues are touched by single operations that Python
makes whole, so the hook's thread waits for nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64

from kvoffload.disk.system import aligned_buffer
from kvoffload.logs import get_logger
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.transfer import Direction, JobReport
from kvoffload.transfer.host_copier import choose_copy
from kvoffload.transfer.slot_pages import pages_from, pages_to

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from concurrent.futures import Executor

    from kvoffload.disk.slot_file import SlotFile
    from kvoffload.model.disk import DiskFile
    from kvoffload.model.ids import JobId
    from kvoffload.model.transfer import DiskJob
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.ports import Clock

SYNC_PERIOD_S = 1.0
_MOST_ERRORS = 8  # in a row, after which the disk is not asked again

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


@dataclass(slots=True, eq=False)
class _OpenJob:
    """A job with slots whose copy has not ended.

    Args:
        job: the job.
        accepted_at: when it came.
        open_slots: how many of its slots' copies have not ended.
        failed: one of them failed.
        is_withdrawn: no copy of it is to begin any more.
        began, ended: when the first copy did, and the last one so far.
        corrupt: positions whose bytes are not those that were written.
        stuck: positions under a write that hangs.
        sums: of a spill, checksums by position.
    """

    job: DiskJob
    accepted_at: float
    open_slots: int
    failed: bool = False
    is_withdrawn: bool = False
    began: float = inf
    ended: float = 0.0
    corrupt: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    sums: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _SlotCopy:
    """One slot of a job, and how its copy ended.

    Args:
        owner: the job.
        position: of the slot in it.
        token: what a thread takes to end the copy; empty once one has.
        began, ended: when its call did.
        outcome, checksum: of a copy that its own thread has ended.
        is_stuck: the hook's thread has ended it, because its call does not return.
    """

    owner: _OpenJob
    position: int
    token: list[None] = field(default_factory=lambda: [None])
    began: float = 0.0
    ended: float = 0.0
    outcome: CopyOutcome = CopyOutcome.FAILED
    checksum: int = 0
    is_stuck: bool = False

    def claim(self) -> bool:
        """Take the token; False where it is taken."""
        try:
            self.token.pop()
        except IndexError:
            return False
        return True


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
    ) -> None:
        self._rank = rank
        self._file = file
        self._arena = arena
        self._executor = executor
        self._clock = clock
        self._timeout_s = timeout_s
        self._checksums = checksums
        self._to_disk = choose_copy()
        self._to_host = choose_copy(arena_is_target=True)
        self._fetches: deque[_SlotCopy] = deque()
        self._spills: deque[_SlotCopy] = deque()
        self._active: dict[int, _SlotCopy] = {}  # by thread
        self._ended: deque[_SlotCopy] = deque()
        self._open = 0
        self._buffers = threading.local()
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
            opened = _OpenJob(job, now, len(job.slots))
            self._open += 1
            for position in range(len(job.slots)):
                self._queue(_SlotCopy(opened, position))
        if not self.is_working:
            self._fail_queued()

    def withdraw(self, jobs: Collection[JobId]) -> None:
        """Begin no more copies of these fetches; they end as failed when their turn comes."""
        for copy in tuple(self._fetches):
            if copy.owner.job.job in jobs:
                copy.owner.is_withdrawn = True

    def poll(self) -> None:
        """Notice calls that do not return, and have the file synced when it is time. Never waits."""
        now = self._clock.monotonic()
        for copy in tuple(self._active.values()):
            if copy.began + self._timeout_s <= now and copy.claim():
                copy.is_stuck = True
                self._ended.append(copy)
                log.error(
                    "disk_call_hangs", rank=self._rank, job=copy.owner.job.job, timeout_s=self._timeout_s
                )
        if not self.is_working:
            self._fail_queued()
        elif not (self._is_synced or self._is_syncing) and now - self._synced_at >= SYNC_PERIOD_S:
            self._is_synced, self._is_syncing, self._synced_at = True, True, now
            self._executor.submit(self._sync)

    def take_reports(self) -> tuple[JobReport, ...]:
        """Return the jobs that ended since the last call."""
        reports: list[JobReport] = []
        while self._ended:
            copy = self._ended.popleft()
            _note(copy)
            if not copy.owner.open_slots:
                self._open -= 1
                reports.append(self._report(copy.owner))
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
        self._close_if_unused()

    # -- threads that may wait for the disk ---------------------------------------------------------------------

    def _run_next(self) -> None:
        """Copy one slot, a fetch before any spill. There are as many calls of this as slots are queued."""
        copy = _next_of(self._fetches) or _next_of(self._spills)
        if copy is None:  # it failed while it was queued
            return
        if copy.owner.is_withdrawn:
            self._ended.append(copy)
            return
        copy.began = self._clock.monotonic()
        thread = threading.get_ident()
        self._active[thread] = copy
        try:
            is_ours = self._write(copy) if copy.owner.job.direction is Direction.STORE else self._read(copy)
        except Exception as error:  # whatever it is, the job ends
            is_ours = copy.claim()
            self._note_error(error)
        copy.ended = self._clock.monotonic()
        if is_ours:
            self._ended.append(copy)
        else:
            log.warning("disk_call_returned", rank=self._rank, after_s=round(copy.ended - copy.began, 1))
        del self._active[thread]  # last: while it is there, `close` leaves the file open
        self._close_if_unused()

    def _write(self, copy: _SlotCopy) -> bool:
        """Write a host slot to its place; return whether the copy is this thread's to end."""
        job, slot, buffer = copy.owner.job, copy.owner.job.slots[copy.position], self._buffer()
        self._to_disk(pages_to(buffer, self._arena, slot))
        # After the copy: what the slot holds now it held during the copy too.
        if self._checksums is not None and not self._checksums.is_as_stored(slot):
            return self._found_corrupt(copy)
        checksum = _checksum(buffer[: self._file.shape.slot_bytes])
        self._file.write(job.places[copy.position], buffer)
        self._errors, self._is_synced = 0, False
        if not copy.claim():
            return False
        copy.outcome, copy.checksum = CopyOutcome.DONE, checksum
        return True

    def _found_corrupt(self, copy: _SlotCopy) -> bool:
        """A host slot does not hold what was stored there, so nothing of it is written."""
        job = copy.owner.job
        log.error("blocks_corrupt", job=job.job, blocks=1, slots=[job.slots[copy.position]])
        copy.outcome = CopyOutcome.CORRUPT
        return copy.claim()

    def _read(self, copy: _SlotCopy) -> bool:
        """Read a place into its host slot, if it holds what it should; return whether the copy is this thread's to end."""
        job, buffer = copy.owner.job, self._buffer()
        self._file.read(job.places[copy.position], buffer)
        self._errors = 0
        is_right = _checksum(buffer[: self._file.shape.slot_bytes]) == job.sums[copy.position][self._rank]
        if not copy.claim():
            return False  # the host slot may be another block's by now
        copy.outcome = CopyOutcome.DONE if is_right else CopyOutcome.CORRUPT
        if is_right:
            slot = job.slots[copy.position]
            self._to_host(pages_from(buffer, self._arena, slot))
            if self._checksums is not None:
                self._checksums.take(slot)
        return True

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

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = aligned_buffer(self._file.shape.pitch)
        return buffer

    def _close_if_unused(self) -> None:
        if self._is_closed and not (self._active or self._is_syncing):
            with suppress(
                IndexError, OSError
            ):  # another thread closes it, or the disk fails, which costs nothing any more
                self._to_close.pop().close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _queue(self, copy: _SlotCopy) -> None:
        is_fetch = copy.owner.job.direction is Direction.LOAD
        (self._fetches if is_fetch else self._spills).append(copy)
        if self.is_working:
            self._executor.submit(self._run_next)

    def _fail_queued(self) -> None:
        for queue in (self._fetches, self._spills):
            while (copy := _next_of(queue)) is not None:
                if copy.claim():
                    self._ended.append(copy)

    def _report(self, opened: _OpenJob) -> JobReport:
        job, now = opened.job, self._clock.monotonic()
        copy_s = max(opened.ended - opened.began, 0.0)
        outcome = CopyOutcome.FAILED if opened.failed else CopyOutcome.DONE
        if opened.corrupt:
            outcome = CopyOutcome.CORRUPT
        is_done = outcome is CopyOutcome.DONE
        positions: Sequence[int] = range(len(job.slots)) if is_done and opened.sums else ()
        return JobReport(
            job=job.job,
            direction=job.direction,
            outcome=outcome,
            copied_bytes=len(job.slots) * self._file.shape.slot_bytes if is_done else 0,
            queue_s=max(now - opened.accepted_at - copy_s, 0.0),
            copy_s=copy_s,
            corrupt=tuple(sorted(opened.corrupt)),
            sums=tuple([opened.sums[position] for position in positions]),
            stuck=tuple(sorted(opened.stuck)),
        )


def _next_of(queue: deque[_SlotCopy]) -> _SlotCopy | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


def _note(copy: _SlotCopy) -> None:
    """Add the end of a slot's copy to its job."""
    owner, is_spill = copy.owner, copy.owner.job.direction is Direction.STORE
    owner.open_slots -= 1
    if copy.ended:
        owner.began, owner.ended = min(owner.began, copy.began), max(owner.ended, copy.ended)
    owner.failed |= copy.outcome is CopyOutcome.FAILED
    if copy.outcome is CopyOutcome.CORRUPT:
        owner.corrupt.append(copy.position)
    if copy.is_stuck and is_spill:
        owner.stuck.append(copy.position)
    if copy.outcome is CopyOutcome.DONE and is_spill:
        owner.sums[copy.position] = copy.checksum


def _checksum(data: memoryview) -> int:
    state = xxh3_64()
    state.update(data)  # a streamed hash releases the interpreter's lock
    return state.intdigest()
