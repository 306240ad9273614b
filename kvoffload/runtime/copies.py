"""The table of running copies, and of the loads that the engine waits for.

Only hooks write to this table: with each plan, each report and each allocation. So the table is right whatever the core
or an observer does (R12).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from kvoffload.core.jobs import Jobs
from kvoffload.core.machine import JobState
from kvoffload.core.state import LoadResults
from kvoffload.model.events import ResetEnded
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, RequestId
from kvoffload.model.wire import DeviceJob, Direction, TransferReport


class OpenCopy(Struct, eq=False):
    """A load or store that at least one rank is still copying.

    Args:
        job: the job.
        submitted: when the job was sent to the workers, in monotonic seconds.
        running: the ranks that are still copying.
        is_overdue: True after the job's time limit.
    """

    job: DeviceJob
    submitted: float
    running: set[Rank]
    is_overdue: bool = False


class LoadAnswers(Struct):
    """Ended loads to report to the engine. Each load is listed once, even after its request has ended.

    Args:
        loaded, failed: requests whose load succeeded or failed.
        without_copy: the requests in `loaded` and `failed` whose load, or the last part of it, was never sent to the
            workers, so that no worker reports the load.
        abandoned: the jobs of `failed` requests that a worker is still copying.
    """

    loaded: list[RequestId] = []
    failed: list[RequestId] = []
    without_copy: list[RequestId] = []
    abandoned: list[JobId] = []


NO_ANSWERS = LoadAnswers()
"""No ended loads, as in most steps. This shared object is never modified."""


class OpenCopies:
    """The running copies by job, and the loads that the engine waits for.

    Args:
        ranks: how many ranks copy each job.
        timeout_s: seconds from submission after which a job is overdue.
        jobs: the core's jobs, for finding the jobs that are open at a reset.
    """

    def __init__(self, ranks: int, timeout_s: float, jobs: Jobs) -> None:
        self._ranks = frozenset(map(Rank, range(ranks)))
        self.timeout_s = timeout_s
        self._jobs = jobs
        self.by_job: dict[JobId, OpenCopy] = {}
        """The running copies, in the order of submission."""
        self._counts = {(direction, is_overdue): 0 for direction in Direction for is_overdue in (False, True)}
        self.awaited: dict[RequestId, JobId | None] = {}
        """The requests whose loads the engine waits for, with the job of each load, or of its last part; None before this job is submitted."""
        self.answers = NO_ANSWERS
        """Ended loads that `take_answers` has not returned yet."""
        # Other threads read the next two attributes, which are assigned and never modified in place.
        self.oldest: float | None = None
        """When the oldest running job that is not overdue was submitted; None if there is no such job."""
        self.draining = 0
        """The number of open jobs from before the last reset, not counting abandoned jobs.

        The results of these jobs are dropped.
        """
        self._from_before_reset: set[JobId] = set()

    # -- loads and stores ---------------------------------------------------------------------------------------

    def submitted(self, jobs: Iterable[DeviceJob], now: float) -> None:
        """Record that jobs are sent to the workers."""
        for job in jobs:
            self.by_job[job.id] = OpenCopy(job, now, set(self._ranks))
            self._counts[job.direction, False] += 1
            if job.extra in self.awaited:
                self.awaited[job.extra] = job.id
            if self.oldest is None:
                self.oldest = now

    def reported(self, report: TransferReport) -> None:
        """Record that a rank's copies have ended. A duplicate report changes nothing."""
        for part in report.jobs:
            copy = self.by_job.get(part.job)
            if copy is None or report.rank not in copy.running:
                continue
            copy.running.discard(report.rank)
            if not copy.running:
                self._counts[copy.job.direction, copy.is_overdue] -= 1
                del self.by_job[part.job]
        if self.by_job:
            self._look()
        else:
            self.oldest = None

    def overdue(self, now: float) -> list[JobId]:
        """Return the jobs that have become overdue since the last call."""
        jobs = []
        for copy in self.by_job.values():
            if not copy.is_overdue and copy.submitted + self.timeout_s <= now:
                copy.is_overdue = True
                self._counts[copy.job.direction, False] -= 1
                self._counts[copy.job.direction, True] += 1
                jobs.append(copy.job.id)
        self._look()
        return jobs

    def blocks(self) -> Counter[DeviceBlockId]:
        """Return how many running jobs copy each device block."""
        return Counter(block for copy in self.by_job.values() for block in copy.job.targets)

    def count(self, direction: Direction, *, is_overdue: bool) -> int:
        """Return how many running jobs have this direction and this `is_overdue`. Any thread may call this method."""
        return self._counts[direction, is_overdue]

    @property
    def is_loading(self) -> bool:
        """Return whether a load runs that is not overdue, or will be submitted with the next plan."""
        return self.count(Direction.LOAD, is_overdue=False) > 0 or None in self.awaited.values()

    # -- answers ------------------------------------------------------------------------------------------------

    def awaits(self, request: RequestId) -> None:
        """Record that the engine waits for this request's load."""
        self.awaited[request] = None

    def answer(self, results: LoadResults) -> None:
        """Add ended loads to `answers`, if the engine still waits for them."""
        answers = LoadAnswers() if self.answers is NO_ANSWERS else self.answers
        for requests, ended in ((results.loaded, answers.loaded), (results.failed, answers.failed)):
            for request in requests:
                if request not in self.awaited:
                    continue
                job = self.awaited[request]
                del self.awaited[request]
                ended.append(request)
                if job is None:
                    answers.without_copy.append(request)
                elif job in self.by_job:
                    answers.abandoned.append(job)
        if answers.loaded or answers.failed:
            self.answers = answers

    def take_answers(self) -> LoadAnswers:
        """Return the ended loads since the last call."""
        answers, self.answers = self.answers, NO_ANSWERS
        return answers

    # -- resets -------------------------------------------------------------------------------------------------

    def reset(self, epoch: int) -> ResetEnded | None:
        """Record which jobs are open at a reset; see `look_at_reset`."""
        self._from_before_reset = set(self._jobs.open)
        return self.look_at_reset(epoch)

    def look_at_reset(self, epoch: int) -> ResetEnded | None:
        """Return an event if all jobs that were open at the last reset have ended or were abandoned."""
        states = [job.state for number, job in self._jobs.open.items() if number in self._from_before_reset]
        abandoned = states.count(JobState.ABANDONED)
        self.draining = len(states) - abandoned
        return None if self.draining else ResetEnded(epoch, abandoned)

    def stop_draining(self) -> None:
        """Stop waiting for the jobs from before the last reset, because the core no longer tracks its jobs."""
        self.draining = 0

    def _look(self) -> None:
        """Update `oldest` to the first running job that is not overdue."""
        for copy in self.by_job.values():
            if not copy.is_overdue:
                self.oldest = copy.submitted
                return
        self.oldest = None
