"""Transfer jobs: who still copies, and what is given back when the last of them has ended.

A job ends for its owner when its outcome is known (all ranks done, or given up); its memory is free only when every
rank has ended its copy. Between the two lies what R4, R9 and R16 are about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvoffload.core.leases import Lease
from kvoffload.core.offers import Offer
from kvoffload.core.pins import Pins
from kvoffload.core.requests import RequestRecord
from kvoffload.core.states import JobEvent, JobState, next_job_state
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, RequestId, SlotId
from kvoffload.model.transfer import Direction, TransferJob


@dataclass(slots=True, eq=False)
class Job:
    """One job's record.

    Args:
        job: its number.
        direction: which way it copies.
        waiting: ranks whose copy has not ended.
        lease: the device blocks, leased until the last rank has ended.
        slots, blocks: what is copied, in the same order.
        offers: a store's offers, in the same order.
        request: a load's request and its incarnation.
        pins: a load's pins on its slots.
        failed: what the first failing rank said.
        corrupt: positions that some rank found corrupt.
        concerns: the requests whose blocks it copies; they are remembered until its last copy has ended.
        settled: its outcome is known; what is left is for the copies to end.
    """

    job: JobId
    direction: Direction
    waiting: set[Rank]
    lease: Lease
    slots: list[SlotId] = field(default_factory=list)
    blocks: list[DeviceBlockId] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    request: tuple[RequestId, int] | None = None
    pins: Pins | None = None
    state: JobState = JobState.PLANNED
    failed: CopyOutcome | None = None
    corrupt: set[int] = field(default_factory=set)
    concerns: list[RequestRecord] = field(default_factory=list)
    settled: bool = False

    @property
    def copies_ended(self) -> bool:
        return not self.waiting

    def as_transfer(self) -> TransferJob:
        """Return what the workers need of it."""
        return TransferJob(self.job, self.direction, tuple(self.slots), tuple(self.blocks))


class Jobs:
    """The open jobs: planned, submitted, and abandoned ones whose copies have not ended."""

    def __init__(self, ranks: int) -> None:
        self._ranks = frozenset(map(Rank, range(ranks)))
        self._open: dict[JobId, Job] = {}
        self._next = 0
        self._counts = {(direction, state): 0 for direction in Direction for state in JobState}
        self.pending = 0
        """Jobs that are planned or submitted: abandoned ones are nothing that anyone waits for."""
        self.planned = 0
        """Jobs that are planned and not yet submitted: what the step's plan has. Counted apart, because every step asks."""

    def plan(self, direction: Direction, lease: Lease) -> Job:
        """Open a job. Changes this."""
        job = Job(JobId(self._next), direction, set(self._ranks), lease)
        self._next += 1
        self._open[job.job] = job
        self.pending += 1
        self.planned += 1
        self._counts[direction, job.state] += 1
        return job

    def submit(self, planned: Iterable[Job]) -> None:
        """Hand jobs over to the workers. Changes this."""
        for job in planned:
            self.move(job, JobEvent.SUBMIT)

    def get(self, job: JobId) -> Job | None:
        """Return an open job, None when it has ended (a report heard twice)."""
        return self._open.get(job)

    def all(self) -> tuple[Job, ...]:
        """Return the open jobs, oldest first. Reads only."""
        return tuple(self._open.values())

    def count(self, direction: Direction, state: JobState) -> int:
        """Return how many open jobs of a direction are in a state."""
        return self._counts[direction, state]

    def move(self, job: Job, event: JobEvent) -> None:
        """Apply an event; a job whose last copy has ended leaves the table."""
        after = next_job_state(job.state, event)
        self.planned -= job.state is JobState.PLANNED
        self.pending += (after is JobState.SUBMITTED) - (job.state is not JobState.ABANDONED)
        self._counts[job.direction, job.state] -= 1
        job.state = after
        if event in (JobEvent.SUBMIT, JobEvent.ABANDON):
            self._counts[job.direction, after] += 1
        else:
            del self._open[job.job]

    def heard(self, job: Job, rank: Rank, outcome: CopyOutcome, corrupt: tuple[int, ...]) -> bool:
        """Note that a rank's copy has ended; return whether that is news."""
        if rank not in job.waiting:
            return False
        job.waiting.discard(rank)
        if outcome is not CopyOutcome.DONE and job.failed is None:
            job.failed = outcome
        job.corrupt.update(corrupt)
        return True
