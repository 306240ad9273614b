"""The tiers below the host: spills, fetches, and what ends both."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.fetches import Fetches
from kvoffload.core.job import Job
from kvoffload.core.machine import JobState
from kvoffload.core.spills import Spills
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.core.warm_start import WarmStart
from kvoffload.model.causes import EvictionCause
from kvoffload.model.disk import Put
from kvoffload.model.events import RankReported
from kvoffload.model.ids import Rank
from kvoffload.model.transfer import Direction, JobReport, Tier, TransferReport


class LowerTiers:
    """Hands a job on a lower tier to `Spills` or `Fetches`, which planned it."""

    def __init__(self, state: CoreState, stores: Stores) -> None:
        self._state = state
        self._tiers = {tier.tier: tier for tier in state.below}
        self._spills = {tier.tier: Spills(state, tier) for tier in state.below}
        self.fetches = Fetches(state, stores)
        self._warm_start = None if state.disk is None else WarmStart(state, state.disk, self.fetches)
        self.queues = [tier.candidates for tier in state.below]
        """While one of them has something, `step` is to be called."""
        if self._warm_start is not None:
            self.queues.append(self._warm_start.keys)

    @property
    def is_due(self) -> bool:
        """Whether steps are needed for copies to be planned."""
        if self._warm_start is not None and self._warm_start.is_due:
            return True
        return any(spills.are_due for spills in self._spills.values())

    def step(self) -> None:
        """Plan what requests do not wait for: a warm start, then spills."""
        if self._warm_start is not None and self._warm_start.keys:
            self._warm_start.step()
        for tier in self._state.below:
            if tier.candidates:
                self._spills[tier.tier].step()

    def restored(self, puts: tuple[Put, ...]) -> None:
        """The disk has these blocks from an earlier process."""
        if self._warm_start is not None:
            self._warm_start.restored(puts)

    def reported(self, report: TransferReport) -> Sequence[JobReport]:
        """Take from a rank's report what concerns lower tiers; return the ends of other copies."""
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
        """What is under way is not to be found, and what no worker knows of is taken back; None for on all tiers."""
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
