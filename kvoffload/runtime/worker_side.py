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
from kvoffload.model.wire import SlotsFile, Tier, TierStatus, TransferPlan, TransferReport
from kvoffload.node.folder import check_free, free_bytes, make_room
from kvoffload.node.table import table_bytes
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.tier_kinds import Places, Worker, copies_of
from kvoffload.transfer.arena import Arena, slots_in_chunk
from kvoffload.transfer.factory import make_allocator, make_checksums, make_copier
from kvoffload.transfer.host_file import HostFile, RankShape, open_host_file
from kvoffload.transfer.host_memory import fits, slots_for
from kvoffload.transfer.layout import check_pieces
from kvoffload.transfer.ports import Clocks
from kvoffload.transfer.pump import TransferPump
from kvoffload.transfer.tier_jobs import TierJobs, TierReport

if TYPE_CHECKING:
    from kvoffload.disk.tier_key import TierKey
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
        tier_key: TierKey | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._local_ranks = local_ranks or ranks
        self._config = config
        self._portal = portal
        self._clock = clock or Clocks()
        self._copier = copier
        self._places = places or {}
        self._tier_key = tier_key
        self._tiers: dict[Tier, TierJobs] = {}
        self._file: HostFile | None = None
        self._prepared_s = 0.0  # how long it took until all host memory was ready; 0 until then
        self._reported_s = 0.0  # what the last report had of this time
        self._file_report: TierReport | None = None  # the last one, as it is repeated
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
        # The machine's first rank checks for all ranks, because free memory shrinks while ranks allocate theirs.
        ranks = self._local_ranks if self._rank % self._local_ranks == 0 else 1
        executor = self._portal.executor
        slots = self._open_memory(layout, ranks)
        file = self._file
        arena = Arena(layout, slots, make_allocator(layout, executor=executor, file=file), clock=self._clock)
        copier = self._copier or make_copier(
            layout, executor=executor, clock=self._clock, batch_copies=self._config.batch_copies
        )
        sums = None if file is None else file.sums
        checksums = make_checksums(self._config.verify, arena, executor=executor, known=sums)
        pump = TransferPump(
            self._rank,
            arena,
            copier,
            self._clock,
            store_bytes_in_flight=_STORE_BYTES_IN_FLIGHT,
            timeout_s=self._config.transfer_timeout_s,
            checksums=checksums,
        )
        self._pump = pump
        self._pid = os.getpid()
        shared = Worker(
            self._config,
            self._rank,
            self._ranks,
            arena,
            self._portal,
            self._clock,
            checksums,
            self._tier_key,
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
            slot_bytes=layout.slot_bytes,
            times_device=round(slots / (layout.regions[0].blocks - 1), 1),  # not counting the null block
            store_policy=self._config.store_policy,
            verify=self._config.verify,
        )
        return slots

    def _open_memory(self, layout: DeviceLayout, ranks: int) -> int:
        """Return how many slots to prepare. Open the file of host memory, if it lies in files.

        Args:
            layout: the rank's device layout.
            ranks: for how many ranks to check that their memory fits.

        Raises:
            ConfigError: the memory does not fit, or the file cannot be used.
        """
        config, place = self._config, self._places.get(Tier.HOST)
        bytes_per_rank = config.host_bytes // self._ranks
        if place is None:
            return slots_for(bytes_per_rank, layout, ranks=ranks)
        claim = place.claim()
        try:
            slots = bytes_per_rank // layout.slot_bytes
            # While the scheduler's process writes its table, that of the process before is still there.
            size = ranks * slots * layout.slot_bytes + 2 * table_bytes(slots, self._ranks) - claim.size
            if self._rank % self._local_ranks == 0:
                make_room(place, lambda: not fits(size) or free_bytes(place.root) < size)
            slots = slots_for(bytes_per_rank, layout, ranks=ranks, kept=claim.size)
            check_free(place.root, size)
            shape = RankShape(self._rank, layout, slots_in_chunk(layout), config.verify)
            self._file = open_host_file(claim, shape, slots)
        except BaseException:
            claim.close()
            raise
        return slots

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
        if plan.stores:
            self.pump.submit_stores(plan.stores)
        for job in plan.below:
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
        if self._file is not None:
            below.insert(0, self._take_file_report(self._file))
        if not below:
            return pump.take_report()
        report = pump.take_report(is_due=any(each.is_new for each in below))
        return report if report is None else with_tiers(report, below)

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
        file, self._file = self._file, None
        may_still_write = False
        try:
            self._run(pump.close)
        except Exception as error:  # The engine must be able to close its other parts.
            may_still_write = True
            log.error("worker_not_closed", rank=self._rank, error=repr(error), exc_info=error)
        if file is not None:
            # A call that a tier does not answer may still read into host slots.
            may_still_write |= any(tier.calls.is_busy for tier in self._tiers.values())
            if not self._config.host_keep:
                file.remove()
            file.close(may_still_write=may_still_write)

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

    def _take_file_report(self, file: HostFile) -> TierReport:
        """Return the report about the file of host memory. It is new once all memory is ready."""
        report = self._file_report
        if report is None or self._prepared_s != self._reported_s:
            file.begin()  # with the first report, the scheduler's side may begin to plan copies
            known = SlotsFile(file.id, file.kept, file.previous, self._prepared_s)
            report = TierReport((), self._prepared_s != self._reported_s, TierStatus(Tier.HOST, True, known))
            self._reported_s = self._prepared_s
            self._file_report = report._replace(is_new=False)
        return report

    async def _prepare(self, arena: Arena, began: float) -> None:
        """Prepare host memory, and log when the memory is ready. The arena logs a failed allocation."""
        await arena.prepare(with_pauses=arena.layout.is_cuda)
        if arena.refusal is None:
            self._prepared_s = round(self._clock.monotonic() - began, 3)
            log.info(
                "host_memory_ready",
                rank=self._rank,
                gib=round(arena.ready_slots * arena.layout.slot_bytes / 2**30, 3),
                blocks=arena.ready_slots,
                seconds=self._prepared_s,
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
