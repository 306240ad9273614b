"""Transfer jobs: which ranks still copy, and which memory a job holds.

A job's *outcome* is known when every rank has ended well, when one has failed (a store), or when it is abandoned. Its
*memory* is free only when every rank has ended its copy. R4, R9 and R16 are about the time between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from msgspec import Struct

from kvoffload.core.machine import JOB, JobEvent, JobState
from kvoffload.core.request import RequestRecord
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, JobId, Rank, SlotId
from kvoffload.model.transfer import Direction, DiskJob, RemoteJob, Tier, TransferJob, TransferPlan

_PLANNED, _SUBMITTED, _ABANDONED = JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED
_SUBMIT, _FINISH, _FAIL = JobEvent.SUBMIT, JobEvent.FINISH, JobEvent.FAIL
_DONE = CopyOutcome.DONE


class Offer(NamedTuple):
    """One computed block that may be stored.

    `record` is None where the device's own free queue offers the block (lazy); the other fields are then meaningless.
    """

    key: BlockKey
    block: DeviceBlockId
    record: RequestRecord | None = None
    incarnation: int = 0
    group: GroupId = GroupId(0)
    position: int = 0


TABLE: Callable[[Offer], tuple[RequestRecord | None, int]] = itemgetter(2, 3)
"""Return whose block table an offer was made from: the request and its incarnation."""


def owner(offer: Offer) -> RequestRecord | None:
    """Return the offering request while it has the block table that the offer was made from, else None."""
    record = offer.record
    if record is None or record.incarnation != offer.incarnation or not record.is_live:
        return None
    return record


class Job(Struct, eq=False):
    """One job's record.

    Args:
        job: its number.
        direction: which way it copies.
        waiting: ranks whose copy has not ended.
        slots, blocks: what is copied, in the same order. The blocks are leased until the last rank has ended.
        offers: a store's offers, in the same order.
        loads_for: a load's request, None for a store.
        incarnation: of that request.
        concerns: the requests whose blocks it copies.
        failed: what the first failing rank reported.
        corrupt: positions that some rank found corrupt.
        settled: its outcome is known; only the ends of copies are pending.
        tier: the lower end of its copies: HOST for those between device and host, a tier below for those between host and it.
        places: of a job on a tier below, that tier's slots, in the order of `slots`.
        keys: of a job on a tier below, in the same order.
        namespace: of a job on a remote store, the namespace of its blocks.
        missing: of a job on a remote store, positions of which the store has no value.
        sums: of a spill, each rank's checksums as far as reported.
        expected: of a fetch, each place's checksums.
        wanted: of a fetch, the requests that wait for it.
        copy_s: of a job on the disk, the seconds of the slowest rank that has reported.
        stuck: of a spill, positions whose place a write that hangs may still change; of a fetch, those whose host slot a read may.
    """

    job: JobId
    direction: Direction
    waiting: set[Rank]
    slots: list[SlotId] = []
    blocks: list[DeviceBlockId] = []
    offers: list[Offer] = []
    loads_for: RequestRecord | None = None
    incarnation: int = 0
    concerns: dict[RequestRecord, None] = {}
    state: JobState = JobState.PLANNED
    failed: CopyOutcome | None = None
    corrupt: set[int] = set()
    settled: bool = False
    tier: Tier = Tier.HOST
    places: list[SlotId] = []
    keys: list[BlockKey] = []
    sums: dict[Rank, tuple[int, ...]] = {}
    expected: tuple[tuple[int, ...], ...] = ()
    wanted: dict[RequestRecord, None] = {}
    copy_s: float = 0.0
    stuck: set[int] = set()
    namespace: str = ""
    missing: set[int] = set()

    @property
    def is_store(self) -> bool:
        """Whether it copies from the device to the host."""
        return self.loads_for is None and self.tier is Tier.HOST

    def reported(self, rank: Rank, outcome: CopyOutcome, corrupt: tuple[int, ...]) -> bool:
        """Note that a rank's copy has ended; return False for a duplicate report, which changes nothing."""
        if rank not in self.waiting:
            return False
        self.waiting.discard(rank)
        if outcome is not _DONE and self.failed is None:
            self.failed = outcome
        self.corrupt.update(corrupt)
        return True


class Jobs:
    """The open jobs: planned, submitted, and abandoned ones whose copies have not ended."""

    def __init__(self, ranks: int) -> None:
        self._ranks = frozenset(map(Rank, range(ranks)))
        self.last = JobId(-1)
        """The number of the job that was planned last."""
        self._counts = {
            (tier, direction): [0] * len(JobState)
            for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)
            for direction in Direction
        }
        self.open: dict[JobId, Job] = {}
        """By number, the oldest first."""
        self.planned: list[Job] = []
        """What the step's plan will have, loads and stores in the order in which they were planned."""
        self.cancelled: list[JobId] = []
        """Submitted fetches that no request waits for any more; the next plan says so to the workers."""
        self.open_below = 0
        """Those of the open jobs that copy between host and a lower tier."""
        self.pending = 0
        """Jobs that are planned or submitted. Abandoned ones are not waited for."""

    def plan(self, direction: Direction, tier: Tier = Tier.HOST) -> Job:
        """Open a job."""
        self.last = JobId(self.last + 1)
        job = Job(self.last, direction, set(self._ranks), tier=tier)
        self.open[job.job] = job
        self.planned.append(job)
        self.pending += 1
        self.open_below += tier is not Tier.HOST
        self._counts[tier, direction][job.state] += 1
        return job

    def count(self, direction: Direction, state: JobState, tier: Tier = Tier.HOST) -> int:
        """Return how many open jobs of a tier and a direction are in a state."""
        return self._counts[tier, direction][state]

    def below(self) -> list[JobId]:
        """Return the open jobs that copy between the host and a tier below it."""
        return [job.job for job in self.open.values() if job.tier is not Tier.HOST]

    @property
    def is_loading(self) -> bool:
        """Whether a load is planned or submitted."""
        counts = self._counts[Tier.HOST, Direction.LOAD]
        return bool(counts[_PLANNED] or counts[_SUBMITTED])

    @property
    def pending_below(self) -> int:
        """Those of the pending jobs that copy between host and a lower tier."""
        states = [counts for (tier, _), counts in self._counts.items() if tier is not Tier.HOST]
        return sum([counts[_PLANNED] + counts[_SUBMITTED] for counts in states])

    def submit(self) -> TransferPlan:
        """Hand what is planned to the workers; return what these need of it.

        The plan is whole before any job moves, and nothing can fail after the first has moved (R12).
        """
        loads: list[TransferJob] = []
        stores: list[TransferJob] = []
        disk: list[DiskJob] = []
        remote: list[RemoteJob] = []
        for job in self.planned:
            if job.tier is Tier.DISK:
                disk.append(
                    DiskJob(job.job, job.direction, tuple(job.slots), tuple(job.places), job.expected)
                )
                continue
            if job.tier is Tier.REMOTE:
                remote.append(
                    RemoteJob(job.job, job.direction, tuple(job.slots), tuple(job.keys), job.namespace)
                )
                continue
            record = job.loads_for
            request = None if record is None else record.request
            part = TransferJob(job.job, job.direction, tuple(job.slots), tuple(job.blocks), request)
            (stores if record is None else loads).append(part)
        plan = TransferPlan(tuple(loads), tuple(stores), tuple(disk), tuple(self.cancelled), tuple(remote))
        moved = JOB.steps[_SUBMIT][_PLANNED]
        for job in self.planned:
            counts = self._counts[job.tier, job.direction]
            counts[_PLANNED] -= 1
            counts[moved] += 1
            job.state = moved
        self.planned.clear()
        if self.cancelled:
            self.cancelled.clear()
        return plan

    def abandon(self, job: Job) -> None:
        """A submitted job takes too long: it is no longer waited for, but its copies may still run."""
        self._move(job, JobEvent.ABANDON)
        self.pending -= 1

    def cancel(self, job: Job) -> None:
        """Take a planned job back; it is closed."""
        self._move(job, JobEvent.CANCEL)
        self.planned.remove(job)
        self.pending -= 1
        del self.open[job.job]
        self.open_below -= job.tier is not Tier.HOST

    def cancel_submitted(self, job: Job) -> None:
        """Have the workers begin no more copies of a fetch; it ends when those that run have ended."""
        self.cancelled.append(job.job)

    def stop(self) -> None:
        """No plan goes to the workers any more."""
        self.cancelled.clear()

    def close(self, job: Job) -> None:
        """Every rank has ended: the job is done or failed, and leaves the table."""
        was = job.state
        job.state = JOB.steps[_FAIL if job.failed else _FINISH][was]
        self._counts[job.tier, job.direction][was] -= 1
        self.pending -= was is _SUBMITTED
        del self.open[job.job]
        self.open_below -= job.tier is not Tier.HOST

    def _move(self, job: Job, event: JobEvent) -> None:
        after, counts = JOB.steps[event][job.state], self._counts[job.tier, job.direction]
        counts[job.state] -= 1
        job.state = after
        if after is _ABANDONED:
            counts[after] += 1
