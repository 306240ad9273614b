"""The tiers below the host: the facts about them, spills, fetches, and what ends both."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.fetches import Fetches
from kvoffload.core.job import Job
from kvoffload.core.machine import JobState, RequestState
from kvoffload.core.remote_state import MOST_ASKED
from kvoffload.core.request import RequestRecord
from kvoffload.core.spills import Spills
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.core.warm_start import WarmStart
from kvoffload.model import facts
from kvoffload.model.causes import EvictionCause
from kvoffload.model.disk import DiskRecord
from kvoffload.model.events import DiskClosed, DiskOpened, RankReported
from kvoffload.model.ids import BlockKey, Rank, RequestId
from kvoffload.model.transfer import Direction, JobReport, Tier, TransferReport

MOST_STEPS = 64
"""For which few blocks wait for others. A kill loses those that wait."""
_ENOUGH = 32
"""Blocks that do not wait. A job takes the hooks as long as some 80 more blocks in another job."""


class LowerTiers:
    """Handles facts about lower tiers, and passes a job on one to `Spills` or `Fetches`, whichever planned it.

    While the engine has requests, few blocks wait for others: the core calls `step` when a queue has `enough`, or when the last spill
    was planned `MOST_STEPS` steps ago.

    Attributes:
        queues: the blocks that `step` plans copies of.
        waited: steps since a spill was planned.
        enough: blocks that do not wait for others; fewer where a job may have no more.
    """

    def __init__(self, state: CoreState, stores: Stores) -> None:
        self._state = state
        self._tiers = {tier.tier: tier for tier in state.below}
        self._spills = {tier.tier: Spills(state, tier) for tier in state.below}
        self.fetches = Fetches(state, stores)
        self._warm_start = None if state.disk is None else WarmStart(state, state.disk, self.fetches)
        self.queues = [tier.candidates for tier in state.below]
        if self._warm_start is not None:
            self.queues.append(self._warm_start.keys)
        self.waited, self.enough = 0, 1

    @property
    def is_due(self) -> bool:
        """Whether steps are needed for copies to be planned."""
        if self._warm_start is not None and self._warm_start.is_due:
            return True
        return any(spills.are_due for spills in self._spills.values())

    def step(self) -> None:
        """Plan copies that no request waits for: a warm start, then spills."""
        if self._warm_start is not None and self._warm_start.keys:
            self._warm_start.step()
        for spills in self._spills.values():
            if spills.step():
                self.waited = 0
        capacity = self._state.pool.capacity
        self.enough = min([_ENOUGH, *[tier.bound.slots(capacity) for tier in self._state.below]])

    # -- facts --------------------------------------------------------------------------------------------------

    def disk_restored(self, fact: facts.DiskRestored) -> None:
        """A part of the disk's index was read. With the last part the disk can be used."""
        disk = self._state.disk
        if disk is None or self._warm_start is None:
            return
        disk.restore(fact.slots, fact.puts, fact.free)
        self._warm_start.restored(fact.puts)
        if fact.is_last:
            disk.is_open = True
            self._state.tally.events.append(DiskOpened(disk.capacity, len(disk.pool.index)))

    def disk_closed(self, _: facts.DiskClosed) -> None:
        """The disk is neither searched nor written any more."""
        disk = self._state.disk
        if disk is not None and not disk.is_closed:
            disk.is_closed = True
            self._state.tally.events.append(DiskClosed())

    def remote_opened(self, fact: facts.RemoteOpened) -> None:
        """The remote store can be asked; under another namespace than before, nothing found so far is there."""
        remote = self._state.remote
        if remote is None:
            return
        if remote.namespace not in ("", fact.namespace):
            self.forget(Tier.REMOTE)
        remote.namespace, remote.is_open, remote.is_closed = fact.namespace, True, False

    def remote_lost(self, _: facts.RemoteLost) -> None:
        """The remote store does not answer: no request asks it, and nothing is copied to it or from it."""
        if self._state.remote is not None:
            self._state.remote.is_closed = True

    def remote_answered(self, fact: facts.RemoteAnswered) -> None:
        """The remote store said which of a request's blocks it has."""
        remote, record = self._state.remote, self._state.requests.live.get(fact.request)
        if record is not None:
            record.awaits_answer = False
        if remote is not None and fact.namespace == remote.namespace:
            remote.note(fact.found, fact.missing)
            if record is not None and record.state is RequestState.SEEN:
                self.fetches.seen(record)

    # -- requests and reports -----------------------------------------------------------------------------------

    def request_seen(self, record: RequestRecord) -> None:
        """Fetch what lower tiers have of an arriving request's prefix, and have the remote store asked for the rest."""
        if self._warm_start is not None and self._warm_start.keys:
            self._warm_start.leave_to(record)
        self.fetches.seen(record)
        state, remote = self._state, self._state.remote
        if remote is None or not (remote.is_usable and record.reads_cache and record.persists):
            return
        if state.degraded is not None:
            return
        above = [state.pool.index, *(tier.pool.index for tier in state.below if tier is not remote)]
        keys = [key for group in record.keys for key in group if not any(key in index for index in above)]
        if keys:
            record.awaits_answer = True
            remote.asks.append((record.request, tuple(keys[:MOST_ASKED])))

    def take_asks(self) -> list[tuple[RequestId, tuple[BlockKey, ...]]]:
        """Return what the remote store must be asked since the last call, and forget it."""
        remote = self._state.remote
        if remote is None or not remote.asks:
            return []
        asks = remote.asks.copy()
        remote.asks.clear()
        return asks

    def take_disk_records(self) -> list[DiskRecord]:
        """Return what the disk's index must record since the last call, and forget it."""
        disk = self._state.disk
        if disk is None or not disk.records:
            return []
        records = disk.records.copy()
        disk.records.clear()
        return records

    def reported(self, report: TransferReport) -> Sequence[JobReport]:
        """Handle the parts of a rank's report that concern lower tiers; return the others."""
        rank = report.rank
        for tier in self._state.below:
            works = report.disk_works if tier.tier is Tier.DISK else report.remote_works
            if works == (rank in tier.failing):
                (tier.failing.discard if works else tier.failing.add)(rank)
            if report.slot_bytes > tier.bound.slot_bytes:
                tier.bound.slot_bytes = report.slot_bytes
        if not self._state.jobs.open_below:
            return report.jobs
        others: list[JobReport] = []
        for part in report.jobs:
            job = self._state.jobs.open.get(part.job)
            if job is None or job.tier is Tier.HOST:
                others.append(part)
            elif job.reported(rank, part.outcome, part.corrupt):
                self._ended(job, rank, part)
        return others

    def abandoned(self, job: Job) -> None:
        """A rank does not report: nothing is begun on its tier until it has."""
        self._tiers[job.tier].abandoned += 1
        self._of(job).abandoned(job)

    def reset(self) -> None:
        """Nothing on a lower tier is found again, whatever is under way."""
        for tier in self._tiers:
            self.forget(tier)

    def forget(self, tier: Tier) -> None:
        """Nothing on this tier is found again."""
        self.stop(tier)
        self._state.tally.evicted_from_disk(EvictionCause.RESET, self._tiers[tier].forget_all())

    def stop(self, tier: Tier | None = None) -> None:
        """Do not let open copies be found, and cancel those that no worker knows of; None means all tiers."""
        if self._warm_start is not None and tier is not Tier.REMOTE:
            self._warm_start.stop()
        for job in list(self._state.jobs.open.values()):
            if job.tier is Tier.HOST or tier not in (None, job.tier):
                continue
            if job.state is JobState.PLANNED:
                self._of(job).cancel(job)
            else:
                self._of(job).stop(job)

    def _ended(self, job: Job, rank: Rank, part: JobReport) -> None:
        """A rank's copy has ended."""
        self._state.tally.events.append(
            RankReported(
                job.job,
                rank,
                job.direction,
                part.outcome,
                part.copied_bytes,
                part.queue_s,
                part.copy_s,
                job.tier,
            )
        )
        if job.state is JobState.ABANDONED and not job.waiting:
            self._tiers[job.tier].abandoned -= 1
        if job.direction is Direction.STORE:
            self._spills[job.tier].reported(job, rank, part)
        else:
            self.fetches.reported(job, part)

    def _of(self, job: Job) -> Spills | Fetches:
        return self._spills[job.tier] if job.direction is Direction.STORE else self.fetches
