"""Drives the copies of one rank.

Two threads share the pump. The hook's thread (the engine's) submits jobs, polls without waiting, and takes reports. The
transfer coroutine runs on another thread; it starts stores and notices when batches have ended. The hook's thread
submits loads immediately, because requests wait for them. Stores wait in a queue for the coroutine, because no request
waits for them and cutting them into batches takes time.

    hook's thread     fence ─ submit_loads ─ one batch ─────────▶ load lane  ─┐
                      submit_stores ─ fence ─▶ store queue                    ├─ reap ─▶ ledger ─▶ take_report
    coroutine         store queue ─ within the byte budget ─────▶ store lane ─┘

* The ledger contains each job from acceptance to its report. A lane contains each submitted batch of one direction.
  Every job ends, whatever the copier raises.
* `_admission` is held while jobs are submitted, and once by `drain`, which ends submission.
* `_reaping` guards the heads of the lanes and the number of open parts of each store. The hook takes this lock only if
  it is free; otherwise the coroutine is already handling ended batches. The coroutine waits for the lock, because the
  hook holds the lock only for a few queries.
* The bytes of stores in flight stay under a limit that adapts below `store_bytes_in_flight` (`AdaptiveLimit`). A batch
  has at most half of the limit. So when the first of two batches ends, the copier runs the second until the pump
  notices that end. If loads and stores share a resource, a load waits for at most the limit's number of bytes.
* When nothing is pending, the coroutine sleeps until a job arrives; a job that arrives while it is awake does not wake
  it. While copies are pending, the coroutine polls each lane. The pauses double while no batch ends. The coroutine
  makes no pause while a large batch is being started in slices. If only stores are pending and all of them are started,
  it makes the longest pause, except on a GPU: no request waits for a store, and the hook's next `poll` notices the end.
* If checksums are kept, a batch's ticket makes an executor's threads read the host slots after the copies have ended.
  Copying and reading together may take `timeout_s`. Timeouts, the drain and the handling of a dead coroutine count a
  batch that is being read as a running copy.
* If a batch with several jobs fails, its jobs are copied again one by one, so that only the bad one fails. Jobs of a
  batch that timed out are not copied again, nor jobs on a device that is lost.
* A started copy cannot be cancelled. When the coroutine is cancelled, jobs that were not started fail at once. The
  coroutine runs, even if cancelled again, until started copies have ended or timed out.
* If the coroutine dies, the hook's `poll` handles ended batches instead, and fails jobs that were not started.
* While the engine sleeps, its device memory is gone. `pause` lets accepted jobs end first, and later jobs fail until
  `resume`. Loads that ended and were not reported are reported as failed, because the memory loses their bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import anyio
import numpy as np

from kvoffload.bus.sleeper import Sleeper
from kvoffload.logs import get_logger
from kvoffload.model.errors import DeviceLost
from kvoffload.model.wire import Direction, TransferReport
from kvoffload.transfer.checksums import CheckedTicket
from kvoffload.transfer.jobs import JobLedger, Part
from kvoffload.transfer.lanes import Batch, Lane
from kvoffload.transfer.runs import merge_runs
from kvoffload.transfer.store_queue import StoreQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvoffload.model.ids import Rank
    from kvoffload.model.wire import DeviceJob
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.jobs import OpenJob
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock, Copier, Fence, Ticket
    from kvoffload.transfer.runs import Numbers

log = get_logger("transfer")

_CLOSING = "the pump is closing"
_PAUSED = "the engine sleeps, so its device memory cannot be used"
_FIRST_PAUSE_S = 0.0002  # shorter than the copy of a few blocks
LONGEST_PAUSE_S = 0.005
"""Python's thread switch interval. Polling more often gains nothing while the engine's thread computes."""


class TransferPump:
    """The copies of one rank, from jobs to reports.

    Args:
        rank: the rank.
        arena: the rank's host memory; `close` closes it.
        copier: moves the bytes; `close` closes it.
        clock: the clock for pauses, timeouts and reports.
        store_bytes_in_flight: the highest limit on the bytes of submitted stores; a single block may exceed it.
        timeout_s: seconds after which a submitted batch counts as hanging.
        checksums: the checksums of the arena's slots; None if none are kept.
    """

    def __init__(
        self,
        rank: Rank,
        arena: Arena,
        copier: Copier,
        clock: Clock,
        *,
        store_bytes_in_flight: int,
        timeout_s: float,
        checksums: Checksums | None = None,
    ) -> None:
        self._rank = rank
        self._arena = arena
        self._copier = copier
        self._clock = clock
        self._timeout_s = timeout_s
        self._checksums = checksums
        self._ledger = JobLedger()
        self._queue = StoreQueue(store_bytes_in_flight, arena.layout.slot_bytes)
        self._loads = Lane(Direction.LOAD, timeout_s)
        self._stores = Lane(Direction.STORE, timeout_s)
        self._lanes = self._loads, self._stores
        self._late_look_at = 0.0
        self._lost: str | None = None  # why this process can no longer use the device
        self._admission = Lock()
        self._reaping = Lock()
        self._sleeper = Sleeper()
        self._pause_s = self._next_pause_s = _FIRST_PAUSE_S
        self._refusal: str | None = None  # why new jobs fail
        self._gone: str | None = None  # why the coroutine starts no more copies
        self._reported: tuple[int, bool, str | None] = (0, True, None)

    # --- the hook's thread ---

    def fence(self) -> Fence:
        """Return a fence behind all work that the calling thread has enqueued on the device, or None after an error."""
        try:
            return self._copier.fence()
        except Exception as error:  # `submit_loads` then records a later fence, which is also safe.
            log.warning("fence_refused", rank=self._rank, reason=repr(error))
            return None

    def submit_loads(self, jobs: Sequence[DeviceJob], fence: Fence = None) -> None:
        """Start loads in one batch, behind all work that the calling thread has enqueued on the device so far.

        A job that cannot be started is reported as failed.

        Args:
            jobs: the loads.
            fence: a fence that the same thread has recorded; the loads then wait only for work enqueued before it.

        Raises:
            IllegalTransition: a job was already submitted; nothing changed.
        """
        if not jobs:
            return
        if self._stores:
            self.poll()  # a store that ends now has not run beside these loads
        with self._admission:
            accepted = self._accept(jobs, fence)
            if self._refusal is not None:
                self._fail(accepted, self._refusal)
                return
            self._start_loads(accepted)
        if self._sleeper.is_asleep:
            self._sleeper.wake()

    def submit_stores(self, jobs: Sequence[DeviceJob]) -> None:
        """Queue stores for the coroutine, behind all work that the calling thread has enqueued on the device so far.

        A job that cannot be started is reported as failed.

        Raises:
            IllegalTransition: a job was already submitted; nothing changed.
        """
        if not jobs:
            return
        with self._admission:
            accepted = self._accept(jobs)
            if refusal := self._gone or self._refusal:
                self._fail(accepted, refusal)
                return
            self._queue.add(accepted)
        if self._sleeper.is_asleep:
            self._sleeper.wake()

    @property
    def has_jobs(self) -> bool:
        """Return whether any job has not ended. Every batch, queued or started, belongs to such a job."""
        return len(self._ledger) > 0

    def poll(self) -> None:
        """Handle the batches that have ended. Never waits."""
        if not (self._loads or self._stores or self._gone is not None or self._abandoned):
            return  # all jobs are stores that the coroutine has not started
        if not self._reaping.acquire(blocking=False):
            return
        try:
            self._reap()
            if self._gone is not None:
                self._fail_queue(self._gone)
        finally:
            self._reaping.release()

    def take_report(self, *, is_due: bool = False) -> TransferReport | None:
        """Return a report of ended jobs and of ready slots, or None if nothing has changed since the last call.

        Args:
            is_due: return a report even if nothing has changed, because the caller has something to add.
        """
        reports = self._ledger.take_reports()
        # Read `is_growing` before `ready_slots`: once `is_growing` is False, `ready_slots` is final.
        is_growing = self._arena.is_growing
        ready_slots = max(self._arena.ready_slots, self._reported[0])
        lost = self._lost or self._loads.lost or self._stores.lost
        state = ready_slots, is_growing, lost
        if not (reports or is_due) and state == self._reported:
            return None
        self._reported = state
        return TransferReport(
            self._rank,
            reports,
            ready_slots,
            store_share=self._queue.limit.share,
            is_growing=is_growing,
            slot_bytes=self._arena.layout.slot_bytes,
            wanted_slots=self._arena.slots,
            lost=lost,
        )

    def coroutine_lost(self, reason: str) -> None:
        """Continue without the transfer coroutine, because its event loop or thread has ended.

        Stores that were not started fail. `poll` handles the end of stores that were started.
        """
        if self._gone is None:
            log.error("transfer_coroutine_lost", rank=self._rank, reason=reason)
            self._gone = reason
        self.poll()

    @property
    def _abandoned(self) -> int:
        return self._loads.abandoned + self._stores.abandoned

    # --- the coroutine ---

    async def run(self) -> None:
        """Start stores and handle ended batches until cancelled, then drain. Call this once."""
        reason = "the transfer coroutine was stopped"
        try:
            await self._turns()
        except asyncio.CancelledError:
            await self.drain()
            raise
        except Exception as error:
            reason = f"the transfer coroutine died: {error!r}"
            log.exception("transfer_coroutine_died", rank=self._rank)
            raise
        finally:
            self._gone = reason
            with self._reaping:
                self._fail_queue(reason)

    async def drain(self) -> int:
        """Accept no more jobs, fail jobs that were not started, and wait until started batches have ended.

        Cancelling does not shorten the drain, which still waits for started batches, at most `timeout_s` for each.

        Returns:
            How many batches timed out and may still touch memory.
        """
        with self._admission:
            self._refusal = _CLOSING
        with self._reaping:
            self._fail_queue(_CLOSING)
        was_cancelled = False
        with anyio.CancelScope(shield=True):
            while self._turn():  # the queue is empty and stays empty
                try:
                    await self._clock.sleep(self._pause_s)
                except asyncio.CancelledError:
                    was_cancelled = True
        if was_cancelled:
            raise asyncio.CancelledError
        return self._abandoned

    async def pause(self) -> bool:
        """Accept no more jobs, and wait until accepted jobs have ended, at most `timeout_s`. `resume` undoes this.

        Returns:
            Whether no copy uses device memory any more. If some copy does, the pump accepts jobs again.
        """
        with self._admission:
            self._refusal = self._refusal or _PAUSED
        deadline = self._clock.monotonic() + self._timeout_s
        self.poll()
        while len(self._ledger) and self._clock.monotonic() < deadline:
            await self._clock.sleep(LONGEST_PAUSE_S)
            self.poll()
        if len(self._ledger):
            self.resume()
            return False
        self._ledger.fail_ended_loads()
        return True

    async def move_device(self, layout: DeviceLayout) -> None:
        """Use the addresses of `layout` from now on. No job may be open.

        Raises:
            EngineContractError: blocks of `layout` differ from the registered ones.
        """
        self._arena.move_device(layout)

    def resume(self) -> None:
        """Accept jobs again after `pause`."""
        with self._admission:
            if self._refusal is _PAUSED:
                self._refusal = None

    async def close(self) -> None:
        """Drain, then close the copier and the arena. The arena stays open if a timed-out copy may still use it."""
        left = await self.drain()
        self._copier.close()
        if left:
            log.error("host_memory_kept", rank=self._rank, abandoned_batches=left)
        else:
            self._arena.close()

    async def _turns(self) -> None:
        while True:
            slices = self._copier.slices
            if not self._turn():
                await self._sleeper.sleep(lambda: any(self._lanes) or bool(self._queue))
            elif self._copier.slices == slices:
                await self._clock.sleep(self._pause_s)
            else:  # slices were enqueued, and the streams may have room for more
                await anyio.lowlevel.checkpoint()

    def _turn(self) -> bool:
        """Handle ended batches and start stores. Return whether any batch is pending afterwards."""
        with self._reaping:
            progress = self._reap()
            progress |= self._start_stores()
        self._pause_s = self._choose_pause(progress=progress)
        return any(self._lanes)

    def _choose_pause(self, *, progress: bool) -> float:
        """Return how long the coroutine pauses: the longest pause if nothing waits until it notices a batch's end."""
        # On a GPU, a large load that comes in a long pause would wait for the pause's end with its later slices.
        may_be_long = not (self._loads or self._queue or self._arena.layout.is_cuda)
        if may_be_long and self._stores.is_started:
            self._next_pause_s = 2 * _FIRST_PAUSE_S
            return LONGEST_PAUSE_S
        pause_s = _FIRST_PAUSE_S if progress else self._next_pause_s
        self._next_pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s

    # --- a job, from acceptance to report ---

    def _accept(self, jobs: Sequence[DeviceJob], fence: Fence = None) -> list[OpenJob]:
        """Accept jobs and set their fence; return the jobs that may be started.

        Args:
            jobs: jobs of one direction.
            fence: the fence, if it is already recorded; by default a new one.

        Raises:
            IllegalTransition: a job was already accepted; nothing changed.
        """
        accepted = self._ledger.accept(jobs, self._clock.monotonic())
        try:
            fence = fence or self._copier.fence()
        except Exception as error:  # The caller is the engine, which must not get a copier's error.
            self._note_lost(error)
            self._fail(accepted, f"no fence: {error!r}")
            return []
        for job in accepted:
            job.fence = fence
        return accepted

    def _start_loads(self, jobs: Iterable[OpenJob]) -> None:
        """Submit accepted loads in one batch."""
        parts = [Part(job, 0, len(job.job.slots)) for job in jobs if self._resolve(job)]
        if parts:
            self._submit(self._loads, Direction.LOAD, parts)

    def _start_stores(self) -> bool:
        """Submit as many queued stores as the limit allows; return whether any were submitted."""
        started = False
        while parts := self._queue.next_batch(self._stores.pending_bytes, self._resolve):
            self._submit(self._stores, Direction.STORE, parts)
            started = True
        return started

    def _reap(self) -> bool:
        """Handle the batches that have ended; return whether there were any."""
        now = self._clock.monotonic()
        # Look for loads before reaping, because loads that end now ran at the same time as the stores.
        is_load_pending = bool(self._loads)
        ended = [*self._loads.reap(now)]
        for batch in self._stores.reap(now):
            ended.append(batch)
            if not batch.failed:
                self._queue.batch_ended(batch, now, is_load_pending=is_load_pending)
        for batch in ended:
            if batch.failed and self._may_retry(batch.parts):
                self._retry(batch)
            else:
                self._settle(batch, now)
        if self._abandoned and now >= self._late_look_at:
            self._late_look_at = now + self._timeout_s / 4
            for batch in itertools.chain.from_iterable(lane.reap_late(now) for lane in self._lanes):
                ended.append(batch)
                self._settle(batch, now)
        return bool(ended)

    def _fail(self, jobs: Iterable[OpenJob], reason: str) -> None:
        """Fail `jobs`: start no more of their parts, and report the jobs that have no running copies."""
        now = self._clock.monotonic()
        for job in jobs:
            log.error("job_failed", direction=job.job.direction.value, job=job.job.id, reason=reason)
            job.failed = True
            if job.is_over:
                self._ledger.end(job, now, self._arena.layout.slot_bytes)

    def _fail_queue(self, reason: str) -> None:
        """Fail every store in the queue, including one that was submitted in part."""
        self._fail([job for job in self._queue.take_all() if not job.failed], reason)

    def _resolve(self, job: OpenJob) -> bool:
        """Return whether the job can be copied. Otherwise fail this job only."""
        if job.started:
            return True
        try:
            job.resolve(self._arena.ready_slots, self._arena.layout.blocks)
        except Exception as error:
            # Catch every error, not only `CopyError`, because ids that are no tuple raise other errors.
            self._fail([job], str(error))
            return False
        return True

    def _submit(self, lane: Lane, direction: Direction, parts: Sequence[Part]) -> None:
        now = self._clock.monotonic()
        try:
            slots = _joined([part.job.slots[part.start : part.end] for part in parts])
            blocks = _joined([part.job.blocks[part.start : part.end] for part in parts])
            runs = merge_runs(self._arena.geometry, direction, slots, blocks)
            fences = {id(part.job.fence): part.job.fence for part in parts}
            ticket: Ticket = self._copier.submit(direction, runs, tuple(fences.values()))
        except Exception as error:  # Nothing was started, so the jobs can end.
            self._note_lost(error)
            if self._may_retry(parts):
                log.warning(
                    "copy_not_submitted", jobs=[part.job.job.id for part in parts], reason=repr(error)
                )
                for part in parts:
                    self._submit(lane, direction, [part])
                return
            self._fail([part.job for part in parts], f"not submitted: {error!r}")
            return
        if self._checksums is not None:
            ticket = CheckedTicket(ticket, partial(self._checksums.start, direction, slots))
        for part in parts:
            part.job.open_parts += 1
            if part.end > part.job.started:  # False for a part that is copied again
                part.job.started = part.end
        size = len(slots) * self._arena.layout.slot_bytes
        lane.add(Batch(ticket, tuple(parts), size, len(runs), now))

    def _may_retry(self, parts: Sequence[Part]) -> bool:
        """Return whether the jobs of a batch that failed may succeed one by one."""
        lost = self._lost or self._loads.lost or self._stores.lost
        return len(parts) > 1 and lost is None and self._refusal is not _CLOSING

    def _retry(self, batch: Batch) -> None:
        """Copy the jobs of a failed batch again, each in a batch of its own. Their memory is still leased and pinned."""
        direction = batch.parts[0].job.job.direction
        log.warning(
            "copied_one_by_one", direction=direction.value, jobs=[part.job.job.id for part in batch.parts]
        )
        lane = self._loads if direction is Direction.LOAD else self._stores
        # The hook's thread, which may be another one, submits loads under the same lock.
        with self._admission if direction is Direction.LOAD else contextlib.nullcontext():
            for part in batch.parts:
                part.job.open_parts -= 1
                if part.job.failed:  # another part of this job failed alone
                    self._fail([part.job], "another of its copies failed")
                else:
                    self._submit(lane, direction, [part])

    def _note_lost(self, error: Exception) -> None:
        if isinstance(error, DeviceLost):
            self._lost = str(error)

    def _settle(self, batch: Batch, now: float) -> None:
        if isinstance(batch.ticket, CheckedTicket) and batch.ticket.corrupt:
            self._note_corrupt(batch, batch.ticket.corrupt)
        for part in batch.parts:
            job = part.job
            job.open_parts -= 1
            job.copy_s += batch.copy_s
            job.failed |= batch.failed
            if job.is_over:
                self._ledger.end(job, now, self._arena.layout.slot_bytes)

    def _note_corrupt(self, batch: Batch, found: Sequence[int]) -> None:
        first = 0
        for part in batch.parts:
            job, end = part.job, first + part.end - part.start
            bad = tuple(part.start + place - first for place in found if first <= place < end)
            if bad:
                job.corrupt += bad
                slots = [job.job.slots[position] for position in bad]
                log.error("blocks_corrupt", job=job.job.id, blocks=len(bad), slots=slots)
            first = end


def _joined(parts: Sequence[Numbers]) -> Numbers:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
