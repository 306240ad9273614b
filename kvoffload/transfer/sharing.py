"""The part of each job that a rank does if several ranks share one copy of host memory.

Ranks whose device blocks have the same bytes use the same host slots. So of a store, a spill and a fetch, each block is
copied by one of them, and the ranks' links share the work. Every rank loads all blocks that it needs.

    between device and host, remote tier    host slot s is copied by rank s % ranks
    disk, or another tier with slots        slot d of the tier is slot d // ranks in the file of rank d % ranks

A rank reports a whole job when its own part has ended, and at once if it has none. So a job's blocks are ready when
every rank has reported, as without sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import JobId, Rank
from kvoffload.model.wire import SLOT_TIERS, AnyJob, Direction, JobReport, TierStatus, TransferReport


class Sharing(NamedTuple):
    """Which ranks share host memory.

    Args:
        ranks: how many ranks, with consecutive numbers on the same machine, have the same bytes in all of their blocks.
        life: names this life of the engine; the same text in all of its processes.
    """

    ranks: int
    life: str

    def first_of(self, rank: Rank) -> Rank:
        """Return the first of the ranks that share memory with `rank`."""
        return Rank(rank - rank % self.ranks)


ALONE = Sharing(1, "")
"""Each rank has its own host memory."""


class SharedJobs:
    """Cuts jobs into the part of one rank, and makes whole reports of the reports about these parts.

    Args:
        place: the rank's place among the ranks that share host memory.
        ranks: how many ranks share it.
    """

    def __init__(self, place: int, ranks: int) -> None:
        self._place = place
        self._ranks = ranks
        self._open: dict[JobId, tuple[AnyJob, list[int]]] = {}  # jobs, and the positions of this rank's parts
        self._nothing_to_do: list[JobReport] = []

    def own(self, jobs: Sequence[AnyJob]) -> list[AnyJob]:
        """Return this rank's parts of stores, spills or fetches. A job without one is in the next report."""
        parts = []
        for job in jobs:
            owners = job.targets if job.tier in SLOT_TIERS else job.slots
            positions = [place for place, owner in enumerate(owners) if owner % self._ranks == self._place]
            if positions:
                self._open[job.id] = job, positions
                parts.append(self._part(job, positions))
            else:
                sums = _sums(job, positions, ())
                self._nothing_to_do.append(
                    JobReport(job.id, job.direction, CopyOutcome.DONE, 0, 0.0, 0.0, sums=sums)
                )
        return parts

    @property
    def is_due(self) -> bool:
        """Return whether jobs without an own part wait for a report."""
        return bool(self._nothing_to_do)

    def whole(self, report: TransferReport) -> TransferReport:
        """Return a rank's report with reports about whole jobs, also about jobs without an own part.

        The ranks' files together are one file for the scheduler's side, with the slots of all. Memory counts once, as that of
        the first rank.
        """
        waiting, self._nothing_to_do = self._nothing_to_do, []
        return replace(
            report,
            jobs=(*waiting, *[self._whole(job) for job in report.jobs]),
            below=tuple([self._with_all_slots(status) for status in report.below]),
            slot_bytes=0 if self._place else report.slot_bytes,
        )

    def _with_all_slots(self, status: TierStatus) -> TierStatus:
        file = status.file
        if status.tier not in SLOT_TIERS or file is None:
            return status
        return replace(status, file=replace(file, slots=file.slots * self._ranks))

    def _part(self, job: AnyJob, positions: list[int]) -> AnyJob:
        slots = tuple([job.slots[place] for place in positions])
        targets, extra = tuple([job.targets[place] for place in positions]), job.extra
        if job.tier in SLOT_TIERS:
            targets = tuple([target // self._ranks for target in targets])
            extra = tuple([extra[place] for place in positions]) if extra else extra
        return replace(job, slots=slots, targets=targets, extra=extra)

    def _whole(self, report: JobReport) -> JobReport:
        job, positions = self._open.pop(report.job, (None, []))
        if job is None:
            return report
        missing = tuple([positions[place] for place in report.missing])
        # The tier lacks all blocks of this part. It may have those of other ranks, so the fetch has not failed as a whole.
        lacks_all = len(missing) == len(positions) and job.direction is Direction.LOAD and not report.corrupt
        return replace(
            report,
            outcome=CopyOutcome.DONE if lacks_all else report.outcome,
            corrupt=tuple([positions[place] for place in report.corrupt]),
            stuck=tuple([positions[place] for place in report.stuck]),
            missing=missing,
            sums=_sums(job, positions, report.sums) if report.outcome is CopyOutcome.DONE else report.sums,
        )


def _sums(job: AnyJob, positions: Sequence[int], own: Sequence[int]) -> tuple[Any, ...]:
    """Return a spill's checksums with 0 for the blocks of other ranks; nothing for other jobs."""
    if job.tier not in SLOT_TIERS or job.direction is not Direction.STORE:
        return ()
    found = dict(zip(positions, own, strict=True))
    return tuple([found.get(place, 0) for place in range(len(job.slots))])
