"""What happens to jobs between acceptance and report; who may do it when is the pump's business.

A job is in the ledger from acceptance to its report and leaves it once. Stores pass through the queue, everything that
was submitted lies in a lane. Whatever a copier raises, the job ends.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.logs import get_logger
from kvoffload.model.transfer import Direction
from kvoffload.transfer.jobs import JobLedger
from kvoffload.transfer.lanes import Batch, Lane
from kvoffload.transfer.runs import merge_runs
from kvoffload.transfer.statistics import TransferStatistics
from kvoffload.transfer.store_queue import Part, StoreQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvoffload.model.transfer import TransferJob
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.jobs import OpenJob
    from kvoffload.transfer.lanes import EndedBatch
    from kvoffload.transfer.ports import Clock, Copier
    from kvoffload.transfer.runs import CopyRuns

log = get_logger("transfer")


class JobFlow:
    """Accepts, submits, notices and reports. Holds no lock: `TransferPump` says which thread may call what.

    Args:
        arena: host memory.
        copier: moves the bytes.
        clock: time.
        store_bytes_in_flight: bound on the bytes of submitted stores.
        timeout_s: seconds after which a submitted batch is written off.
    """

    def __init__(
        self, arena: Arena, copier: Copier, clock: Clock, *, store_bytes_in_flight: int, timeout_s: float
    ) -> None:
        self.ledger = JobLedger()
        self._arena = arena
        self._copier = copier
        self._clock = clock
        self._timeout_s = timeout_s
        self._late_look_at = 0.0
        self._queue = StoreQueue(store_bytes_in_flight, arena.layout.slot_bytes)
        self._loads = Lane(Direction.LOAD, timeout_s)
        self._stores = Lane(Direction.STORE, timeout_s)
        self._lanes = (self._loads, self._stores)  # in the order in which they are served

    @property
    def is_pending(self) -> bool:
        """Whether batches are pending, those written off apart."""
        return bool(self._loads or self._stores)

    @property
    def has_queued_stores(self) -> bool:
        return bool(self._queue)

    @property
    def written_off(self) -> int:
        """Batches that were written off and have not ended."""
        return self._loads.written_off + self._stores.written_off

    def accept(self, jobs: Sequence[TransferJob]) -> list[OpenJob]:
        """Take jobs in and record what their copies wait for; return those that may be started.

        Raises:
            IllegalTransition: a job was taken in before; nothing changed.
        """
        accepted = self.ledger.accept(jobs, self._clock.monotonic())
        try:
            fence = self._copier.fence()
        except Exception as error:  # the caller is the engine: it must not stumble over a copier
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
        while parts := self._queue.next_batch(self._stores.pending_bytes, self._resolve):
            self._submit(self._stores, Direction.STORE, parts)
            started = True
        return started

    def reap(self) -> bool:
        """Notice which batches have ended; return whether any has."""
        now = self._clock.monotonic()
        ended = [found for lane in self._lanes for found in lane.reap(now)]
        if self.written_off and now >= self._late_look_at:
            self._late_look_at = now + self._timeout_s / 4
            ended += itertools.chain.from_iterable(lane.reap_late(now) for lane in self._lanes)
        for found in ended:
            self._settle(found, now)
        return bool(ended)

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
        lanes = self._lanes
        return TransferStatistics(
            wake_ups=wake_ups,
            queries=sum(lane.queries for lane in lanes),
            batches=sum(lane.batches for lane in lanes),
            copies=sum(lane.copies for lane in lanes),
            jobs_done=self.ledger.done,
            jobs_failed=self.ledger.failed,
            loaded_bytes=self.ledger.done_bytes[Direction.LOAD],
            stored_bytes=self.ledger.done_bytes[Direction.STORE],
            open_jobs=len(self.ledger),
            queued_stores=len(self._queue),
            pending_batches=sum(len(lane) for lane in lanes),
            written_off_batches=self.written_off,
            store_bytes_in_flight=self._stores.pending_bytes,
        )

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
            self.fail([part.job for part in parts], f"not submitted: {error!r}")
            return
        for part in parts:
            part.job.open_parts += 1
        lane.add(Batch(ticket, tuple(part.job for part in parts), runs.total_bytes, len(runs), now))

    def _merged(self, direction: Direction, parts: Sequence[Part]) -> CopyRuns:
        slots = [part.job.slots[part.start : part.end] for part in parts if part.job.slots is not None]
        blocks = [part.job.blocks[part.start : part.end] for part in parts if part.job.blocks is not None]
        return merge_runs(self._arena.geometry, direction, np.concatenate(slots), np.concatenate(blocks))

    def _settle(self, ended: EndedBatch, now: float) -> None:
        for job in ended.batch.parts:
            job.open_parts -= 1
            job.copy_s += ended.copy_s
            job.failed |= ended.failed
            if job.is_over:
                self.ledger.end(job, now, self._arena.layout.slot_bytes)
