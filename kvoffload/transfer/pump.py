"""Drives the copies of one rank.

Two threads share it. The hook's thread (the engine's) submits jobs, polls without waiting, and takes reports. The transfer
coroutine runs on another thread, starts stores and notices ends. The hook's thread submits loads at once, because a request
waits for them. Stores wait in a queue for the coroutine, because no request waits for them and cutting them takes time.

    hook's thread     fence ─ submit_loads ─ one batch ─────────▶ load lane  ─┐
                      submit_stores ─ fence ─▶ store queue                    ├─ reap ─▶ ledger ─▶ take_report
    coroutine         store queue ─ within the byte budget ─────▶ store lane ─┘

* `JobFlow` has the queue, the two lanes and the ledger, and does the work; this file decides which thread may do it when.
* `_admission` is held while jobs are submitted, and once by the drain that ends submission; otherwise it is uncontended.
* `_reaping` guards the lanes' heads and every part count of a store. The hook only ever tries it: when the coroutine
  holds it, ends are being noticed anyway. The coroutine waits for the hook, which holds it for a few queries.
* Stores in flight stay under a bound that adapts below `store_bytes_in_flight` (`store_bound.py`), in batches of at most
  half of it: the copier always has a next batch while an end is being noticed, and a load waits for at most that many
  bytes where both share a resource.
* With nothing pending the coroutine sleeps until a job comes; it is not woken while it is awake. With copies pending it
  polls the oldest ticket of each lane, at intervals that double while nothing ends.
* Where checksums are kept, a batch that was copied has them read by an executor's threads before its jobs are reported.
  It stays pending until then, so time-outs, drain and death treat it as a running copy.
* A started copy cannot be cancelled. On cancellation, jobs that were not started fail at once; the coroutine stays, even if
  cancelled again, until started copies have ended or been written off.
* If the coroutine dies, the hook's `poll` notices ends in its place and fails jobs that were not started.
"""

from __future__ import annotations

import asyncio
from threading import Lock
from typing import TYPE_CHECKING

import anyio

from kvoffload.logs import get_logger
from kvoffload.model.errors import IllegalTransition
from kvoffload.model.transfer import TransferReport
from kvoffload.transfer.backoff import Backoff
from kvoffload.transfer.flow import JobFlow
from kvoffload.transfer.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.model.ids import Rank
    from kvoffload.model.transfer import TransferJob
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.disk_copies import DiskNews
    from kvoffload.transfer.ports import Clock, Copier, Fence
    from kvoffload.transfer.statistics import TransferStatistics

log = get_logger("transfer")

_CLOSING = "the pump is closing"


class TransferPump:
    """The copies of one rank, from jobs to reports.

    Args:
        rank: whose.
        arena: host memory; `close` closes it.
        copier: moves the bytes; `close` closes it.
        clock: time.
        store_bytes_in_flight: most bytes of submitted stores; a single block may exceed it.
        timeout_s: seconds after which a submitted batch counts as never ending.
        checksums: of the arena's slots, None where none are kept.
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
        self._flow = JobFlow(
            arena,
            copier,
            clock,
            store_bytes_in_flight=store_bytes_in_flight,
            timeout_s=timeout_s,
            checksums=checksums,
        )
        self._admission = Lock()
        self._reaping = Lock()
        self._wakeup = Wakeup()
        self._backoff = Backoff()
        self._was_started = False
        self._is_closing = False
        self._gone: str | None = None  # why the coroutine will start nothing more
        self._reported: tuple[int, bool, str | None] = (0, True, None)
        self._wake_ups = 0

    # --- the hook's thread ---

    def fence(self) -> Fence:
        """Return what stands for all that the calling thread has enqueued on the device so far, None if it cannot be had."""
        try:
            return self._copier.fence()
        except Exception as error:  # a later fence serves as well
            log.warning("fence_refused", rank=self._rank, reason=repr(error))
            return None

    def submit_loads(self, jobs: Sequence[TransferJob], fence: Fence = None) -> None:
        """Start loads, all in one batch, behind what the calling thread has enqueued on the device so far.

        A job that cannot be started is reported as failed.

        Args:
            jobs: the loads.
            fence: taken before by the same thread; the loads then wait only for what was enqueued before it.

        Raises:
            IllegalTransition: a job was handed in before; nothing changed.
        """
        if not jobs:
            return
        with self._admission:
            accepted = self._flow.accept(jobs, fence)
            if self._is_closing:
                self._flow.fail(accepted, _CLOSING)
                return
            self._flow.start_loads(accepted)
        self._wakeup.set()

    def submit_stores(self, jobs: Sequence[TransferJob]) -> None:
        """Queue stores for the coroutine, behind what the calling thread has enqueued on the device so far.

        A job that will not be started is reported as failed.

        Raises:
            IllegalTransition: a job was handed in before; nothing changed.
        """
        if not jobs:
            return
        with self._admission:
            accepted = self._flow.accept(jobs)
            if self._is_closing or self._gone is not None:
                self._flow.fail(accepted, self._gone or _CLOSING)
                return
            self._flow.queue_stores(accepted)
        self._wakeup.set()

    def poll(self) -> None:
        """Notice what has ended, without waiting for anything."""
        flow = self._flow
        is_stranded = self._gone is not None and flow.has_queued_stores
        if not (flow.is_pending or flow.written_off or is_stranded):
            return
        if not self._reaping.acquire(blocking=False):
            return
        try:
            flow.reap()
            if self._gone is not None:
                flow.fail_queue(self._gone)
        finally:
            self._reaping.release()

    def take_report(self, disk: DiskNews | None = None) -> TransferReport | None:
        """Return what ended since the last call and the slots that are ready, None when there is nothing new.

        Args:
            disk: what the rank's disk reports.
        """
        reports = self._flow.ledger.take_reports()
        works, file = True, None
        if disk is not None:
            reports, works, file = (*reports, *disk.jobs), disk.works, disk.file
        # Asked in this order, so that the last slots are there when no more are on their way.
        is_growing = self._arena.is_growing
        ready_slots = max(self._arena.ready_slots, self._reported[0])
        state = ready_slots, is_growing, self._flow.lost
        if not reports and state == self._reported and (disk is None or not disk.is_new):
            return None
        self._reported = state
        return TransferReport(
            self._rank,
            reports,
            ready_slots,
            self._flow.store_share,
            is_growing,
            self._arena.layout.slot_bytes,
            self._arena.slots,
            self._flow.lost,
            works,
            file,
        )

    def coroutine_lost(self, reason: str) -> None:
        """Take over from `run`, whose loop or thread is gone.

        Stores that were not started fail; `poll` keeps noticing the ends of started ones.
        """
        if self._gone is None:
            log.error("transfer_coroutine_lost", rank=self._rank, reason=reason)
            self._gone = reason
        self.poll()

    @property
    def has_work(self) -> bool:
        """Whether copies are queued or pending, or a report waits to be taken. Written-off copies are no work."""
        return self._flow.is_pending or self._flow.has_queued_stores or self._flow.ledger.has_reports

    @property
    def is_alive(self) -> bool:
        """Whether the coroutine may still start stores."""
        return self._gone is None

    def statistics(self) -> TransferStatistics:
        """Return counts for metrics and tests. Callable from any thread."""
        return self._flow.statistics(self._wake_ups)

    # --- the coroutine ---

    async def run(self) -> None:
        """Start stores and notice ends until cancelled; then drain.

        Raises:
            IllegalTransition: it was started before.
        """
        if self._was_started:
            raise IllegalTransition("transfer coroutine", self._gone or "running", "run")
        self._was_started = True
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
                self._flow.fail_queue(reason)

    async def drain(self) -> int:
        """Take no more jobs, fail those not started, and wait until the started ones have ended.

        Cancelling it does not end it: what was started is waited for all the same, each batch for `timeout_s` at most.

        Returns:
            The number of written-off batches that may still touch memory.
        """
        with self._admission:
            self._is_closing = True
        with self._reaping:
            self._flow.fail_queue(_CLOSING)
        was_cancelled = False
        with anyio.CancelScope(shield=True):
            while self._turn():  # the queue is empty and stays so
                try:
                    await self._clock.sleep(self._backoff.next_s)
                except asyncio.CancelledError:
                    was_cancelled = True
        if was_cancelled:
            raise asyncio.CancelledError
        return self._flow.written_off

    async def close(self) -> None:
        """Drain, then close the copier and the arena. The arena stays where a written-off copy may still touch it."""
        left = await self.drain()
        self._copier.close()
        if left:
            log.error("host_memory_kept", rank=self._rank, written_off_batches=left)
        else:
            self._arena.close()

    async def _turns(self) -> None:
        while True:
            self._wakeup.clear()
            self._wake_ups += 1
            if self._turn():
                await self._clock.sleep(self._backoff.next_s)
            else:
                await self._wakeup.wait()

    def _turn(self) -> bool:
        """Notice ends and start stores; return whether anything is pending then."""
        with self._reaping:
            progress = self._flow.reap()
            progress |= self._flow.start_stores()
            # Asked before the hook may look: with nothing pending the coroutine sleeps, also beside a queue.
            is_pending = self._flow.is_pending
        self._backoff.note(progress=progress)
        return is_pending
