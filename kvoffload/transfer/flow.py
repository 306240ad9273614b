"""What happens to jobs between acceptance and report; who may do it when is the pump's business.

A job is in the ledger from acceptance to its report and leaves it once. Stores pass through the queue, everything that
was submitted lies in a lane. Whatever a copier raises, the job ends.

Where checksums are kept a batch passes through two lanes: that of its copies, and when they have ended that of its
checksums. It keeps the time of its submission, so both together have `timeout_s`, and its bytes count as in flight.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.logs import get_logger
from kvoffload.model.errors import DeviceLost
from kvoffload.model.transfer import Direction
from kvoffload.transfer.checksums import ChecksumTicket
from kvoffload.transfer.jobs import JobLedger, Part
from kvoffload.transfer.lanes import Batch, Lane
from kvoffload.transfer.runs import merge_runs
from kvoffload.transfer.statistics import TransferStatistics
from kvoffload.transfer.store_bound import StoreBound
from kvoffload.transfer.store_queue import StoreQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvoffload.model.transfer import TransferJob
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.jobs import OpenJob
    from kvoffload.transfer.lanes import EndedBatch
    from kvoffload.transfer.ports import Clock, Copier, Fence
    from kvoffload.transfer.runs import CopyRuns, Numbers

log = get_logger("transfer")


class JobFlow:
    """Accepts, submits, notices and reports. Holds no lock: `TransferPump` says which thread may call what.

    Args:
        arena: host memory.
        copier: moves the bytes.
        clock: time.
        store_bytes_in_flight: most bytes of submitted stores; the bound adapts below it.
        timeout_s: seconds after which a submitted batch is written off.
        checksums: of the slots, None where none are kept.
    """

    def __init__(
        self,
        arena: Arena,
        copier: Copier,
        clock: Clock,
        *,
        store_bytes_in_flight: int,
        timeout_s: float,
        checksums: Checksums | None = None,
    ) -> None:
        self.ledger = JobLedger()
        self._arena = arena
        self._copier = copier
        self._checksums = checksums
        self._clock = clock
        self._timeout_s = timeout_s
        self._late_look_at = 0.0
        self._lost: str | None = None
        self._bound = StoreBound(store_bytes_in_flight, arena.layout.slot_bytes)
        self._queue = StoreQueue(self._bound, arena.layout.slot_bytes)
        self._loads = Lane(Direction.LOAD, timeout_s)
        self._stores = Lane(Direction.STORE, timeout_s)
        self._copies = (self._loads, self._stores)  # in the order in which they are served
        self._readings: dict[Direction, Lane] = {}
        if checksums is not None:
            self._readings = {
                way: Lane(way, timeout_s, "checksum") for way in (Direction.LOAD, Direction.STORE)
            }
        self._lanes = (*self._copies, *self._readings.values())

    @property
    def is_pending(self) -> bool:
        """Whether batches are pending, those written off apart."""
        return bool(self._loads or self._stores or (self._readings and any(self._readings.values())))

    @property
    def has_queued_stores(self) -> bool:
        return bool(self._queue)

    @property
    def store_share(self) -> float:
        """The bound on bytes of submitted stores, over the most that it can be."""
        return self._bound.share

    @property
    def written_off(self) -> int:
        """Batches that were written off and have not ended."""
        copies = self._loads.written_off + self._stores.written_off
        return (
            copies + sum(lane.written_off for lane in self._readings.values()) if self._readings else copies
        )

    @property
    def lost(self) -> str | None:
        """Why the device runs nothing more of this process, None while it does."""
        return self._lost or next((lane.lost for lane in self._copies if lane.lost), None)

    def accept(self, jobs: Sequence[TransferJob], fence: Fence = None) -> list[OpenJob]:
        """Take jobs in and record what their copies wait for; return those that may be started.

        Args:
            jobs: all of one direction.
            fence: what they wait for, if that was recorded before.

        Raises:
            IllegalTransition: a job was accepted before; nothing changed.
        """
        accepted = self.ledger.accept(jobs, self._clock.monotonic())
        try:
            fence = fence or self._copier.fence()
        except Exception as error:  # the caller is the engine: it must not stumble over a copier
            self._note_lost(error)
            self.fail(accepted, f"no fence: {error!r}")
            return []
        for job in accepted:
            job.fence = fence
        return accepted

    def start_loads(self, jobs: Iterable[OpenJob]) -> None:
        """Submit accepted loads in one batch."""
        parts = [Part(job, 0, len(job.job.slots)) for job in jobs if self._resolve(job)]
        for part in parts:
            part.job.started = part.end
        if parts:
            self._submit(self._loads, Direction.LOAD, parts)

    def queue_stores(self, jobs: Iterable[OpenJob]) -> None:
        """Keep accepted stores for `start_stores`."""
        self._queue.add(jobs)

    def start_stores(self) -> bool:
        """Submit queued stores as far as the bound allows; return whether any was."""
        started = False
        while parts := self._queue.next_batch(self._store_bytes, self._resolve):
            self._submit(self._stores, Direction.STORE, parts)
            started = True
        return started

    def reap(self) -> bool:
        """Notice which batches have ended; return whether any has."""
        now = self._clock.monotonic()
        is_load_pending = bool(self._loads)  # before its lane is looked at: it was while the stores ran
        copied = [found for lane in self._copies for found in lane.reap(now)]
        self._note_stores(copied, now, is_load_pending=is_load_pending)
        read = [found for lane in self._readings.values() for found in lane.reap(now)]
        if self.written_off and now >= self._late_look_at:
            self._late_look_at = now + self._timeout_s / 4
            copied += itertools.chain.from_iterable(lane.reap_late(now) for lane in self._copies)
            read += itertools.chain.from_iterable(lane.reap_late(now) for lane in self._readings.values())
        for found in read:
            self._settle(found, now)
        for found in copied:
            if found.failed or not self._read(found):
                self._settle(found, now)
        return bool(read or copied)

    def fail(self, jobs: Iterable[OpenJob], reason: str) -> None:
        """Start no more of `jobs`, and report those of which nothing runs."""
        now = self._clock.monotonic()
        for job in jobs:
            log.error("job_failed", direction=job.job.direction.value, job=job.job.job, reason=reason)
            job.failed = True
            if job.is_over:
                self.ledger.end(job, now, self._arena.layout.slot_bytes)

    def fail_queue(self, reason: str) -> None:
        """Fail every store of which a part was not started."""
        self.fail([job for job in self._queue.take_all() if not job.failed], reason)

    def statistics(self, wake_ups: int) -> TransferStatistics:
        """Return counts. Callable from any thread."""
        return TransferStatistics(
            wake_ups=wake_ups,
            queries=sum(lane.queries for lane in self._lanes),
            batches=sum(lane.batches for lane in self._copies),
            copies=sum(lane.copies for lane in self._copies),
            jobs_done=self.ledger.done,
            jobs_failed=self.ledger.failed,
            loaded_bytes=self.ledger.done_bytes[Direction.LOAD],
            stored_bytes=self.ledger.done_bytes[Direction.STORE],
            open_jobs=len(self.ledger),
            queued_stores=len(self._queue),
            pending_batches=sum(len(lane) for lane in self._lanes),
            written_off_batches=self.written_off,
            store_bytes_in_flight=self._store_bytes,
            store_bytes_bound=self._bound.bytes,
        )

    @property
    def _store_bytes(self) -> int:
        reading = self._readings.get(Direction.STORE)
        return self._stores.pending_bytes + (reading.pending_bytes if reading is not None else 0)

    def _resolve(self, job: OpenJob) -> bool:
        """Whether the job can be copied; one that cannot fails here, alone."""
        if job.slots is not None:
            return True
        try:
            job.resolve(self._arena.ready_slots, self._arena.layout.blocks)
        except Exception as error:  # also what no type check would let through
            self.fail([job], str(error))
            return False
        return True

    def _submit(self, lane: Lane, direction: Direction, parts: Sequence[Part]) -> None:
        now = self._clock.monotonic()
        try:
            runs = self._merged(direction, parts)
            fences = {id(part.job.fence): part.job.fence for part in parts}
            ticket = self._copier.submit(direction, runs, tuple(fences.values()))
        except Exception as error:  # nothing was started, so the jobs can end
            self._note_lost(error)
            self.fail([part.job for part in parts], f"not submitted: {error!r}")
            return
        for part in parts:
            part.job.open_parts += 1
        lane.add(Batch(ticket, direction, tuple(parts), runs.total_bytes, len(runs), now))

    def _note_lost(self, error: Exception) -> None:
        if isinstance(error, DeviceLost):
            self._lost = str(error)

    def _merged(self, direction: Direction, parts: Sequence[Part]) -> CopyRuns:
        blocks = [part.job.blocks[part.start : part.end] for part in parts if part.job.blocks is not None]
        return merge_runs(self._arena.geometry, direction, _slots(parts), np.concatenate(blocks))

    def _note_stores(self, copied: Iterable[EndedBatch], now: float, *, is_load_pending: bool) -> None:
        for found in copied:
            if found.batch.direction is Direction.STORE and not found.failed:
                self._bound.batch_ended(found.batch, found.copy_s, now, is_load_pending=is_load_pending)

    def _read(self, copied: EndedBatch) -> bool:
        """Have the checksums of a batch read whose copies have ended well; False where nothing was begun."""
        if self._checksums is None:
            return False
        batch = copied.batch
        try:
            ticket = self._checksums.start(batch.direction, _slots(batch.parts))
        except Exception as error:  # as with a copy: whatever it is, the jobs end
            self.fail([part.job for part in batch.parts], f"checksums not read: {error!r}")
            return False
        for part in batch.parts:
            part.job.copy_s += copied.copy_s
        self._readings[batch.direction].add(replace(batch, ticket=ticket, copies=0))
        return True

    def _settle(self, ended: EndedBatch, now: float) -> None:
        self._note_corrupt(ended.batch)
        for part in ended.batch.parts:
            job = part.job
            job.open_parts -= 1
            job.copy_s += ended.copy_s
            job.failed |= ended.failed
            if job.is_over:
                self.ledger.end(job, now, self._arena.layout.slot_bytes)

    def _note_corrupt(self, batch: Batch) -> None:
        found = batch.ticket.corrupt if isinstance(batch.ticket, ChecksumTicket) else ()
        first = 0
        for part in batch.parts:
            job, end = part.job, first + part.end - part.start
            bad = tuple(part.start + place - first for place in found if first <= place < end)
            if bad:
                job.corrupt += bad
                slots = [job.job.slots[position] for position in bad]
                log.error("blocks_corrupt", job=job.job.job, blocks=len(bad), slots=slots)
            first = end


def _slots(parts: Iterable[Part]) -> Numbers:
    return np.concatenate(
        [part.job.slots[part.start : part.end] for part in parts if part.job.slots is not None]
    )
