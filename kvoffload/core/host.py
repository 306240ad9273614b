"""The host's slots, the tiers below the host, and the jobs between them, without the requests that use them.

`CoreState` adds an engine's requests and device to this state. `TierCache` has this state alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.jobs import DeviceJob, Failure, InFlight, Jobs, Load, Stall
from kvoffload.core.machine import JobState, SlotState
from kvoffload.core.slots import SlotPool
from kvoffload.core.tally import MissMemory, Tally
from kvoffload.core.tiers import LowerTier, NodeTier, RemoteTier
from kvoffload.model import events
from kvoffload.model.causes import DegradeCause, EvictionCause, MissCause, RejectionCause
from kvoffload.model.facts import HostGrown, TierRestored
from kvoffload.model.ids import BlockKey, JobId, Rank
from kvoffload.model.wire import Tier, TransferReport


class HostState:
    """The host's slots, the tiers below the host, and all open jobs.

    Args:
        ranks: the number of ranks.
        tiers: the classes of the lower tiers in the order in which they are searched, each with the number of times
            that lookups must find a block before it is written to the tier.
        stall_limit: how many device blocks timed-out jobs may lease together before new copies stop.
    """

    def __init__(
        self, ranks: int, tiers: Sequence[tuple[type[LowerTier], int]], stall_limit: int = 0
    ) -> None:
        names = [Rank(rank) for rank in range(ranks)]
        self.jobs = Jobs(ranks)
        self.tiers = tuple([kind(after_hits, self.jobs, names) for kind, after_hits in tiers])
        """The tiers below the host, in the order in which they are searched."""
        self.by_name: dict[Tier, LowerTier] = {tier.tier: tier for tier in self.tiers}
        self.node = next((tier for tier in self.tiers if isinstance(tier, NodeTier)), None)
        """The host memory of other engines on this machine; None if it is not used."""
        self.asked = next((tier for tier in self.tiers if isinstance(tier, RemoteTier)), None)
        """The tier that must be asked for a request's blocks, the lowest one; None without one."""
        self.pool = SlotPool()
        self.in_flight = InFlight()
        """The keys that are being copied to the host."""
        self.misses = MissMemory()
        self.tally = Tally(self.jobs.planned)
        self.stall = Stall(stall_limit)
        self.ready = dict.fromkeys(names, 0)
        """How many host slots each rank has ready."""
        self.growing = set(self.ready)
        """Ranks that have not yet reported that all of their host memory is ready."""
        self.epoch = 0
        """The number of resets so far."""
        self.degraded: DegradeCause | None = None
        """Why offloading is switched off until the engine restarts; None while it is on."""

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """Count blocks that the host evicted for space."""
        self.misses.note(keys, MissCause.EVICTED)
        # `lost` counts evicted blocks that were still waiting to be spilled.
        lost = max([tier.count_candidates(keys) for tier in self.tiers], default=0)
        age_s = self.pool.order.age_s
        self.tally.evicted(EvictionCause.SPILL_BEHIND, lost, age_s)
        self.tally.evicted(EvictionCause.SPACE, len(keys) - lost, age_s)

    def reported(self, report: TransferReport) -> None:
        """Record which copies a rank has ended and how many slots it has ready. A duplicate report changes nothing."""
        if self.growing or self.ready.get(report.rank) != report.ready_slots:
            self._ready(report)
        for status in report.below:
            if status.tier in self.by_name:
                tier = self.by_name[status.tier]
                tier.rank_reported(report.rank, report.slot_bytes, works=status.works)
        for part in report.jobs:
            job = self.jobs.open.get(part.job)
            if job is None or not job.reported(report.rank, part.outcome, part.copy_s):
                continue
            event = events.RankReported(
                job=job.id,
                rank=report.rank,
                direction=job.direction,
                outcome=part.outcome,
                copied_bytes=part.copied_bytes,
                queue_s=part.queue_s,
                copy_s=part.copy_s,
                tier=job.tier,
            )
            self.tally.events.append(event)
            job.owner.reported(job, report.rank, part)
            if not job.waiting:
                if self.stall.blocks and isinstance(job, DeviceJob):
                    self.tally.events += self.stall.ended(job)
                job.owner.ended(job)
                self.jobs.close(job)

    def overdue(self, number: JobId) -> None:
        """Stop waiting for a job after its time limit, and quarantine the slots that it may still write (R16)."""
        job = self.jobs.open.get(number)
        if job is not None and job.state is JobState.SUBMITTED:
            self.jobs.time_out(job)
            job.owner.failed(job, Failure.TIMED_OUT)

    def forget_all(self) -> None:
        """Discard all blocks on the host and on the lower tiers, so that lookups find none of them (R10)."""
        self.epoch += 1
        dropped = self.pool.forget_all()
        self.misses.reset(dropped)
        for job in tuple(self.jobs.open.values()):
            if not isinstance(job, Load):
                self.jobs.drop(job)
        for tier in self.tiers:
            self.tally.evicted_below(tier.tier, EvictionCause.RESET, tier.forget_all())
        self.tally.evicted(EvictionCause.RESET, len(dropped))
        draining = self.pool.count(SlotState.DRAINING)
        self.tally.events.append(events.ResetStarted(self.epoch, len(dropped), draining, self.jobs.pending))

    def _ready(self, report: TransferReport) -> None:
        """Grow the pool to the number of slots that every rank has ready."""
        rank = report.rank
        if rank not in self.ready:
            self.tally.rejected(RejectionCause.UNKNOWN_JOB)
            return
        if self.pool.for_catalog is not None:
            return  # the catalog says which slots are ready, and which blocks they have
        if not report.is_growing:
            self.growing.discard(rank)
        if report.ready_slots > self.ready[rank]:
            self.ready[rank] = report.ready_slots
            if self.pool.grow(min(self.ready.values())):
                self.tally.events.append(events.CapacityGrown(self.pool.capacity))

    def restored(self, fact: TierRestored) -> None:
        """Add host slots, with the blocks that an earlier process left in them.

        Between two parts, requests may store or fetch blocks of a later part again. So each key gets one slot, and none
        if it is on the host or on its way. The catalog's table has the other slots' keys, until it gets the slots as free.
        """
        pool, before = self.pool, self.pool.capacity
        slots = {put.key: put.slot for put in fact.puts}
        blocks = {
            slot: key
            for key, slot in slots.items()
            if key not in pool.index and key not in self.in_flight.keys
        }
        twice = [put.slot for put in fact.puts if put.slot not in blocks]
        pool.adopt(fact.slots, blocks, (*fact.free, *twice))
        if pool.for_catalog is not None:
            pool.for_catalog += twice
        if blocks:
            self.tally.events.append(events.BlocksAdopted(len(blocks)))
        if fact.slots > before:
            self.tally.events.append(events.CapacityGrown(fact.slots))

    def grown(self, fact: HostGrown) -> None:
        """Add empty host slots."""
        if self.pool.grow(fact.slots):
            self.tally.events.append(events.CapacityGrown(fact.slots))
        if fact.is_last:
            self.growing.clear()
