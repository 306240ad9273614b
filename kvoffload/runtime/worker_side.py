"""The worker's side of offloading for one rank. An adapter's hooks call it."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from msgspec.structs import replace

from kvoffload.logs import get_logger
from kvoffload.model.config import OffloadConfig, size_text
from kvoffload.model.errors import CopyError
from kvoffload.model.ids import Rank
from kvoffload.model.wire import AnyJob, Tier, TransferPlan, TransferReport
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.rank_memory import RankMemory, Ranks, open_memory
from kvoffload.runtime.tier_kinds import Places, Worker, copies_of
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.factory import make_allocator, make_checksums, make_copier
from kvoffload.transfer.layout import check_pieces
from kvoffload.transfer.ports import Clocks
from kvoffload.transfer.pump import TransferPump
from kvoffload.transfer.sharing import ALONE, SharedJobs, Sharing
from kvoffload.transfer.tier_jobs import TierJobs, TierReport

if TYPE_CHECKING:
    from kvoffload.disk.tier_key import TierKey
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock, Copier, Fence

P = ParamSpec("P")
Answer = TypeVar("Answer")

log = get_logger("worker")

_STORE_BYTES_IN_FLIGHT = 64 * 2**20  # a few milliseconds of copying, for which a load may have to wait
_DRAIN_S = 5.0  # how many seconds longer than `transfer_timeout_s` `close` and `unregister` wait for copies
_PINNING_S = 10.0  # how many seconds an engine's start waits for pinned memory


class WorkerSide:
    """Copies one rank's shards of blocks, between its device, host memory and the lower tiers.

    Args:
        rank, ranks: the rank's number, and the number of ranks.
        local_ranks: how many ranks, with consecutive numbers, run on this machine; by default all ranks.
        sharing: which ranks share host memory; by default none.
        config: the operator's settings.
        portal: runs the transfer coroutine.
        clock: the transfer coroutine's clock.
        copier: copies the bytes; by default a copier for the tensors' device.
        places: where the engine's blocks are on each lower tier.
        tier_key: authenticates the contents of lower tiers; None if all writers of these tiers are trusted.
    """

    def __init__(
        self,
        rank: Rank,
        ranks: int,
        config: OffloadConfig,
        portal: Portal,
        *,
        clock: Clock | None = None,
        copier: Copier | None = None,
        places: Places | None = None,
        local_ranks: int | None = None,
        sharing: Sharing = ALONE,
        tier_key: TierKey | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = Ranks(rank, ranks, local_ranks or ranks, sharing)
        self._shared = None if sharing.ranks == 1 else SharedJobs(rank % sharing.ranks, sharing.ranks)
        self._config = config
        self._portal = portal
        self._clock = clock or Clocks()
        self._copier = copier
        self._places = places or {}
        self._tier_key = tier_key
        self._tiers: dict[Tier, TierJobs] = {}
        self._memory = RankMemory(0)
        self._pump: TransferPump | None = None
        self._tasks: list[Future[None]] = []
        # The arena, and when pinning its memory began; None after the first step, or if no memory is pinned.
        self._unprepared: tuple[Arena, float] | None = None
        self._load_fence: Fence = None
        self._pid = 0  # the process that the pump belongs to

    def register(self, layout: DeviceLayout) -> int:
        """Register the rank's KV memory and start to prepare host memory. Return how many slots there will be.

        With CUDA, this method pins memory for up to ten seconds, and the remaining memory is pinned after the first
        step begins. In between the engine captures graphs, which pinning on any thread can break.

        Raises:
            ConfigError: `host_bytes` is less than one block or more than the machine has left, or `layout` requires
                each block in one piece and the engine stores blocks in several pieces.
        """
        check_pieces(self._config.layout, layout)
        self._memory = open_memory(self._config, self._ranks, layout, self._places.get(Tier.HOST))
        try:
            return self._register(layout)
        except BaseException:
            if self._pump is None:  # Without a pump, `close` does nothing.
                self._memory.close(keeps=self._config.host_keep, may_still_write=False)
            raise

    def _register(self, layout: DeviceLayout) -> int:
        executor, memory = self._portal.executor, self._memory
        slots, file = memory.slots, memory.file
        arena = Arena(layout, slots, make_allocator(layout, executor=executor, file=file), clock=self._clock)
        sums = None if file is None else file.sums
        checksums = make_checksums(self._config.verify, arena, executor=executor, known=sums)
        self._pump = pump = self._make_pump(arena, checksums)
        self._pid = os.getpid()
        shared = Worker(
            self._config,
            self._rank,
            self._ranks.count,
            arena,
            self._portal,
            self._clock,
            checksums,
            self._tier_key,
            self._ranks.sharing,
        )
        self._tiers = copies_of(self._places, shared)
        began = self._clock.monotonic()
        if layout.is_cuda:
            self._portal.spawn(arena.prepare_for, _PINNING_S).result()
            self._unprepared = arena, began
        else:
            self._tasks.append(self._portal.spawn(self._prepare, arena, began))
        running = self._portal.spawn(pump.run)
        running.add_done_callback(lambda _: self._coroutine_ended(pump))
        self._tasks.append(running)
        log.info(
            "worker_registered",
            rank=self._rank,
            host_bytes=size_text(self._config.host_bytes),
            slots=slots,
            host_copies=self._ranks.copies,
            slot_bytes=layout.slot_bytes,
            times_device=round(slots / (layout.regions[0].blocks - 1), 1),  # not counting the null block
            store_policy=self._config.store_policy,
            verify=self._config.verify,
        )
        return slots

    def _make_pump(self, arena: Arena, checksums: Checksums | None) -> TransferPump:
        copier = self._copier or make_copier(
            arena.layout,
            threads=self._portal.executor,
            clock=self._clock,
            batch_copies=self._config.batch_copies,
        )
        return TransferPump(
            self._rank,
            arena,
            copier,
            self._clock,
            store_bytes_in_flight=_STORE_BYTES_IN_FLIGHT,
            timeout_s=self._config.transfer_timeout_s,
            checksums=checksums,
        )

    def unregister(self) -> None:
        """Wait until no copy uses the KV memory, which the engine may then release. Until `restore`, jobs fail.

        Does nothing before `register`, and in a forked child. Calling it twice does nothing more.

        Raises:
            CopyError: a copy still uses the memory after `transfer_timeout_s`; the memory must stay. Jobs are accepted.
        """
        if self._pump is None or self._pid != os.getpid():
            return
        if not self._run(self._pump.pause):
            timeout_s = self._config.transfer_timeout_s
            raise CopyError(
                f"copies still use the KV cache after transfer_timeout_s = {timeout_s:g} s, so its memory cannot be released"
            )

    def restore(self, layout: DeviceLayout | None = None) -> None:
        """Copy again, after the engine has its KV memory back.

        Args:
            layout: the memory's new addresses; by default the old ones.

        Raises:
            CopyError: `unregister` was not called, and a copy uses the old memory.
            EngineContractError: the blocks of `layout` differ from those that were registered.
        """
        if self._pump is None or self._pid != os.getpid():
            return
        if layout is not None:
            self.unregister()
            self._run(self._pump.move_device, layout)
        self._pump.resume()

    def begin_step(self, plan: TransferPlan) -> None:
        """Begin a step. The step's loads wait for the device work that the calling thread has enqueued before (R13).

        The step's forward pass does not use the loads' blocks, so an engine may launch the pass before `start_loads`.
        """
        unprepared, self._unprepared = self._unprepared, None
        if unprepared is not None and self._portal.is_alive:
            # Only the portal can pin memory.
            self._tasks.append(self._portal.spawn(self._prepare, *unprepared))
        self._load_fence = self.pump.fence() if plan.loads else None

    def start_loads(self, plan: TransferPlan) -> None:
        """Submit the plan's loads, which wait for the device work enqueued before `begin_step`."""
        if plan.loads:
            fence, self._load_fence = self._load_fence, None
            self.pump.submit_loads(plan.loads, fence)

    def start_stores(self, plan: TransferPlan) -> None:
        """Submit the plan's stores, its jobs with lower tiers, and its cancellations.

        Stores wait for the device work that the calling thread has enqueued before (R13).
        """
        stores: Sequence[AnyJob] = plan.stores
        below: Sequence[AnyJob] = plan.below
        if self._shared is not None:
            stores, below = self._shared.own(stores), self._shared.own(below)
        if stores:
            self.pump.submit_stores(stores)
        for job in below:
            self._tiers[job.tier].submit(job)
        if plan.cancelled:
            for tier in self._tiers.values():
                tier.cancel(plan.cancelled)

    def take_report(self) -> TransferReport | None:
        """Return a report of the copies that ended since the last call; None if nothing is new. Never waits."""
        pump = self.pump
        if pump.has_jobs:
            if not self._portal.is_alive:
                pump.coroutine_lost("the portal's thread is gone")
            pump.poll()
        taken = [tier.take() for tier in self._tiers.values()] if self._tiers else ()
        below = [report for report in taken if report is not None]
        if self._memory.is_found_later:
            below.insert(0, self._memory.take_report())
        shared = self._shared
        if not below and shared is None:
            return pump.take_report()
        is_due = any(each.is_new for each in below) or (shared is not None and shared.is_due)
        report = pump.take_report(is_due=is_due)
        if report is None:
            return None
        report = with_tiers(report, below)
        return report if shared is None else shared.whole(report)

    def close(self) -> None:
        """Wait for started copies to end, and free the memory. In a forked child, do nothing.

        The copies and the memory are the parent's. A thread of the parent may have held the pump's locks at the fork.
        """
        if self._pump is None or self._pid != os.getpid():
            return
        pump, self._pump = self._pump, None
        for tier in self._tiers.values():
            tier.close()
        for task in self._tasks:
            task.cancel()
        may_still_write = False
        try:
            self._run(pump.close)
        except Exception as error:  # The engine must be able to close its other parts.
            may_still_write = True
            log.error("worker_not_closed", rank=self._rank, error=repr(error), exc_info=error)
        # A call that a tier does not answer may still read into host slots.
        may_still_write |= any(tier.calls.is_busy for tier in self._tiers.values())
        self._memory.close(keeps=self._config.host_keep, may_still_write=may_still_write)

    def _run(
        self, async_fn: Callable[P, Coroutine[object, object, Answer]], *args: P.args, **kwargs: P.kwargs
    ) -> Answer:
        """Run a coroutine function of the pump that may wait for copies, and return its result."""
        # Copies may still use the memory after the portal has ended, so a new portal waits for them.
        portal = self._portal if self._portal.is_alive else Portal("kvoffload-drain")
        try:
            return portal.spawn(async_fn, *args, **kwargs).result(self._config.transfer_timeout_s + _DRAIN_S)
        finally:
            if portal is not self._portal:
                portal.close()

    async def _prepare(self, arena: Arena, began: float) -> None:
        """Prepare host memory, and log when the memory is ready. The arena logs a failed allocation."""
        await arena.prepare(with_pauses=arena.layout.is_cuda)
        if arena.refusal is None:
            self._memory.prepared_s = round(self._clock.monotonic() - began, 3)
            log.info(
                "host_memory_ready",
                rank=self._rank,
                gib=round(arena.ready_slots * arena.layout.slot_bytes / 2**30, 3),
                blocks=arena.ready_slots,
                seconds=self._memory.prepared_s,
            )

    def _coroutine_ended(self, pump: TransferPump) -> None:
        """Report to the pump that its coroutine has ended, except while `close` runs."""
        if self._pump is pump:
            pump.coroutine_lost("the transfer coroutine ended")

    @property
    def pump(self) -> TransferPump:
        """Return the pump that runs this rank's copies."""
        assert self._pump is not None, "call register() first"
        return self._pump


def with_tiers(report: TransferReport, below: Sequence[TierReport]) -> TransferReport:
    """Return a report with the reports about lower tiers added.

    The lower tiers' jobs come first: when the core processes a spill's end, a load that ran beside the spill must
    still count as open (see `AdaptiveLimit`).
    """
    jobs = [job for tier in below for job in tier.jobs]
    return replace(report, jobs=(*jobs, *report.jobs), below=tuple([tier.status for tier in below]))
