"""The disk below the host: spills, fetches, and what ends both."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.disk_state import DiskState
from kvoffload.core.fetches import Fetches
from kvoffload.core.job import Job
from kvoffload.core.machine import JobState
from kvoffload.core.spills import Spills
from kvoffload.core.state import CoreState
from kvoffload.core.stores import Stores
from kvoffload.core.warm_start import WarmStart
from kvoffload.model.causes import EvictionCause
from kvoffload.model.events import RankReported
from kvoffload.model.ids import Rank
from kvoffload.model.transfer import Direction, JobReport, Tier, TransferReport


class DiskTier:
    """Hands a job on the disk to `Spills` or `Fetches`, which planned it."""

    def __init__(self, state: CoreState, disk: DiskState, stores: Stores) -> None:
        self._state = state
        self._disk = disk
        self.spills = Spills(state, disk)
        self.fetches = Fetches(state, disk, stores)
        self.warm_start = WarmStart(state, disk, self.fetches)
        self.candidates = disk.candidates

    def reported(self, report: TransferReport) -> Sequence[JobReport]:
        """Take from a rank's report what concerns the disk; return the ends of other copies."""
        disk, rank = self._disk, report.rank
        if report.disk_works == (rank in disk.failing):
            (disk.failing.discard if report.disk_works else disk.failing.add)(rank)
        if report.slot_bytes > disk.bound.slot_bytes:
            disk.bound.slot_bytes = report.slot_bytes
        if not self._state.jobs.open_on_disk:
            return report.jobs
        others: list[JobReport] = []
        for part in report.jobs:
            job = self._state.jobs.open.get(part.job)
            if job is None or job.tier is not Tier.DISK:
                others.append(part)
            elif job.reported(rank, part.outcome, part.corrupt):
                self._ended(job, rank, part)
        return others

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
                Tier.DISK,
            )
        )
        if job.state is JobState.ABANDONED and not job.waiting:
            self._disk.abandoned -= 1
        if job.direction is Direction.STORE:
            self.spills.reported(job, rank, part)
        else:
            self.fetches.reported(job, part)

    def abandoned(self, job: Job) -> None:
        """A rank does not report: nothing is begun until it has."""
        self._disk.abandoned += 1
        self._of(job).abandoned(job)

    def reset(self) -> None:
        """Nothing on the disk is found again, whatever is under way."""
        self.stop()
        self._state.tally.evicted_from_disk(EvictionCause.RESET, self._disk.forget_all())

    @property
    def is_due(self) -> bool:
        """Whether steps are needed for copies to be planned."""
        return self.spills.are_due or self.warm_start.is_due

    def step(self) -> None:
        """Plan what requests do not wait for: a warm start, then spills."""
        if self.warm_start.keys:
            self.warm_start.step()
        if self._disk.candidates:
            self.spills.step()

    def stop(self) -> None:
        """What is under way is not to be found, and what no worker knows of is taken back."""
        self.warm_start.stop()
        for job in [job for job in self._state.jobs.open.values() if job.tier is Tier.DISK]:
            if job.state is JobState.PLANNED:
                self._of(job).cancel(job)
            else:
                self._of(job).stop(job)

    def _of(self, job: Job) -> Spills | Fetches:
        return self.spills if job.direction is Direction.STORE else self.fetches
