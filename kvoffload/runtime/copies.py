"""The table of open copies. An entry exists from the first pin or the plan of a copy until its last report.

Hooks record which loads the engine waits for and which memory workers may still use. These records do not depend on the
core's events, so they are complete even after the core has raised (R12). Events only add data for operators and for
`NetBenefit`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from msgspec import Struct, field

from kvoffload.bus.bus import Bus
from kvoffload.core.jobs import Jobs
from kvoffload.core.machine import JobState
from kvoffload.core.state import LoadResults
from kvoffload.model import events
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, RequestId
from kvoffload.model.wire import DeviceJob, Direction, TransferReport
from kvoffload.telemetry.catalogue import Hook


class HookTime(Struct):
    """The time of the current hook. Each hook sets the time at its start, so that code inside the hook reads no clock.

    Args:
        now: when the current hook began, in monotonic seconds.
        spent: for each hook, the seconds that its calls have taken since the last step.
    """

    now: float = -math.inf
    spent: defaultdict[Hook, float] = field(default_factory=lambda: defaultdict(float))


CopyEnded: TypeAlias = events.LoadEnded | events.TierCopyEnded


class OpenCopy(Struct, eq=False):
    """A load, a store, or a fetch for a request. Times are monotonic seconds.

    Args:
        request: the request that loads or fetches; None for a store.
        pinned: when host slots were pinned for the copy; None if no slot is pinned.
        job: the job's id; None until the job is planned.
        tokens: how many tokens a load or fetch copies.
        planned: when a load or fetch was planned; None after its wait has been counted.
        copy_s: copy time in seconds, summed over the ranks.
        given: the job; None until the job is sent to the workers.
        submitted: when the job was sent to the workers.
        running: the ranks that are still copying.
        is_overdue: True after the job's time limit.
        has_ended: True once an event has reported the job's end, or if no event will.
    """

    request: RequestId | None = None
    pinned: float | None = None
    job: JobId | None = None
    tokens: int = 0
    planned: float | None = None
    copy_s: float = 0.0
    given: DeviceJob | None = None
    submitted: float = 0.0
    running: set[Rank] = set()
    is_overdue: bool = False
    has_ended: bool = False


class LoadAnswers(Struct):
    """Ended loads to report to the engine. Each load is listed once, even after its request has ended.

    Args:
        loaded, failed: requests whose load succeeded or failed.
        without_copy: the requests in `loaded` and `failed` whose load was never sent to the workers, so that no worker
            reports the load.
        abandoned: the jobs of `failed` requests that a worker is still copying.
    """

    loaded: list[RequestId] = []
    failed: list[RequestId] = []
    without_copy: list[RequestId] = []
    abandoned: list[JobId] = []


NO_ANSWERS = LoadAnswers()
"""No ended loads, as in most steps. This shared object is never modified."""


class OpenCopies:
    """The table of open copies, by job.

    A copy is also listed by request while host slots are pinned for the copy or the engine waits for the load.

    Args:
        ranks: how many ranks copy each job.
        timeout_s: seconds from submission after which a job is overdue.
        jobs: the core's jobs, for finding the jobs that are open at a reset.
        hook: the current hook's time.
        bus: the bus to observe, on which `ResetEnded` is published.

    Attributes:
        on_end: called with each load or fetch that ends, and with the event that reports this end.
    """

    def __init__(self, ranks: int, timeout_s: float, jobs: Jobs, hook: HookTime, bus: Bus) -> None:
        self._ranks = frozenset(map(Rank, range(ranks)))
        self.timeout_s = timeout_s
        self._jobs = jobs
        self._bus = bus
        self._hook = hook
        self.on_end: Callable[[OpenCopy, CopyEnded], object] = lambda copy, event: None
        self.by_job: dict[JobId, OpenCopy] = {}
        self.by_request: dict[RequestId, OpenCopy] = {}
        self._counts = {(direction, is_overdue): 0 for direction in Direction for is_overdue in (False, True)}
        self.awaited: dict[RequestId, None] = {}
        """The requests whose loads the engine waits for."""
        self.answers = NO_ANSWERS
        """Ended loads that `SchedulerSide.take_answers` has not returned yet."""
        # Other threads read the next three attributes, which are assigned and never modified in place.
        self.oldest: float | None = None
        """When the oldest running job that is not overdue was submitted; None if there is no such job."""
        self.oldest_pin: float | None = None
        """When the oldest pin began; None without pins."""
        self.draining = 0
        """The number of open jobs from before the last reset, not counting abandoned jobs.

        The results of these jobs are dropped.
        """
        self._epoch = 0
        self._from_before_reset: set[JobId] = set()
        bus.count(events.HitPinned, self._hit_pinned)
        bus.count(events.HitDropped, self._hit_dropped)
        bus.count(events.LoadScheduled, self._load_scheduled)
        bus.count(events.LoadEnded, self._load_ended)
        bus.count(events.TierCopyScheduled, self._fetch_scheduled)
        bus.count(events.TierCopyEnded, self._fetch_ended)
        bus.count(events.ResetStarted, self._reset_started)

    # -- calls from hooks ---------------------------------------------------------------------------------------

    def awaits(self, request: RequestId) -> None:
        """Record that the engine waits for this request's load."""
        copy = self.by_request.get(request)
        if copy is None or copy.job is not None:
            self.by_request[request] = OpenCopy(request)
        self.awaited[request] = None

    def submitted(self, jobs: Iterable[DeviceJob]) -> None:
        """Record that jobs are sent to the workers."""
        now = self._hook.now
        for job in jobs:
            copy = self.by_job.get(job.id)
            # No event reports the end of a store, or of a load whose first event was lost.
            if copy is None:
                load = None if job.extra is None else self.by_request.get(job.extra)
                copy = self.by_job[job.id] = load or OpenCopy()
                copy.job = job.id
                copy.has_ended = True
            copy.given = job
            copy.submitted = now
            copy.running = set(self._ranks)
            self._counts[job.direction, False] += 1
            if self.oldest is None:
                self.oldest = now

    def reported(self, report: TransferReport) -> None:
        """Record that a rank's copies have ended. A duplicate report changes nothing."""
        for part in report.jobs:
            copy = self.by_job.get(part.job)
            if copy is None or report.rank not in copy.running:
                continue
            copy.running.discard(report.rank)
            if part.outcome is CopyOutcome.DONE:
                copy.copy_s += part.copy_s
            if copy.given is not None and not copy.running:
                self._counts[copy.given.direction, copy.is_overdue] -= 1
                if copy.has_ended:
                    del self.by_job[part.job]
        self._look()

    def overdue(self) -> list[JobId]:
        """Return the jobs that have become overdue since the last call."""
        jobs = []
        for copy in self.by_job.values():
            job = copy.given
            if job is None or copy.is_overdue or not copy.running:
                continue
            if copy.submitted + self.timeout_s <= self._hook.now:
                copy.is_overdue = True
                self._counts[job.direction, False] -= 1
                self._counts[job.direction, True] += 1
                jobs.append(job.id)
        self._look()
        return jobs

    def answer(self, results: LoadResults) -> None:
        """Add ended loads to `answers`, if the engine still waits for them."""
        answers = LoadAnswers() if self.answers is NO_ANSWERS else self.answers
        for requests, ended in ((results.loaded, answers.loaded), (results.failed, answers.failed)):
            for request in requests:
                if request not in self.awaited:
                    continue
                del self.awaited[request]
                copy = self.by_request[request]
                ended.append(request)
                if copy.given is None:
                    answers.without_copy.append(request)
                elif copy.running:
                    answers.abandoned.append(copy.given.id)
                if copy.pinned is None:
                    del self.by_request[request]
        if answers.loaded or answers.failed:
            self.answers = answers

    def look_at_reset(self) -> None:
        """Publish the end of the last reset if all jobs that were open at the reset have ended or were abandoned."""
        states = [job.state for number, job in self._jobs.open.items() if number in self._from_before_reset]
        abandoned = states.count(JobState.ABANDONED)
        self.draining = len(states) - abandoned
        if not self.draining:
            self._bus.publish(events.ResetEnded(self._epoch, abandoned))

    def forget_events(self) -> None:
        """Drop entries that only an event could remove, because the core publishes no more events."""
        self.by_job = {
            job: copy for job, copy in self.by_job.items() if copy.running and copy.given is not None
        }
        self.by_request = {request: self.by_request[request] for request in self.awaited}
        for copy in (*self.by_job.values(), *self.by_request.values()):
            copy.has_ended = True
            copy.pinned = copy.planned = None
        self.oldest_pin = None
        self.draining = 0

    # -- queries ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[DeviceJob]:
        """Return the jobs that at least one rank is still copying, including overdue ones."""
        return [copy.given for copy in self.by_job.values() if copy.running and copy.given is not None]

    def blocks(self) -> Counter[DeviceBlockId]:
        """Return how many running jobs copy each device block."""
        return Counter(block for job in self.running for block in job.targets)

    def count(self, direction: Direction, *, is_overdue: bool) -> int:
        """Return how many running jobs have this direction and this `is_overdue`. Any thread may call this method."""
        return self._counts[direction, is_overdue]

    # -- event handlers -----------------------------------------------------------------------------------------

    def _hit_pinned(self, event: events.HitPinned) -> None:
        self._pin(self.by_request.get(event.request) or OpenCopy(event.request))

    def _hit_dropped(self, event: events.HitDropped) -> None:
        copy = self.by_request.get(event.request)
        if copy is not None:
            self._unpin(copy)

    def _load_scheduled(self, event: events.LoadScheduled) -> None:
        copy = self.by_request.get(event.request)
        if copy is None or copy.job is not None:
            copy = OpenCopy(event.request)
        copy.job = event.job
        copy.tokens = event.tokens
        copy.planned = self._hook.now
        self._pin(copy)
        self.by_job[event.job] = copy

    def _load_ended(self, event: events.LoadEnded) -> None:
        copy = self.by_job.get(event.job)
        if copy is not None:
            copy.has_ended = True
            self._unpin(copy)
            if not copy.running:
                del self.by_job[event.job]
            self.on_end(copy, event)

    def _fetch_scheduled(self, event: events.TierCopyScheduled) -> None:
        if event.tokens and event.request is not None:
            self.by_job[event.job] = OpenCopy(
                event.request,
                job=event.job,
                tokens=event.tokens,
                planned=self._hook.now,
                running=set(self._ranks),
            )

    def _fetch_ended(self, event: events.TierCopyEnded) -> None:
        fetch = self.by_job.pop(event.job, None)
        if fetch is not None:
            self.on_end(fetch, event)

    def _reset_started(self, event: events.ResetStarted) -> None:
        self._epoch = event.epoch
        self._from_before_reset = set(self._jobs.open)
        self.look_at_reset()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _pin(self, copy: OpenCopy) -> None:
        """Record when slots were pinned for a copy. `by_request` stays in the order of the pins."""
        assert copy.request is not None
        if copy.pinned is None:
            copy.pinned = self._hook.now
            self.by_request.pop(copy.request, None)
            self.by_request[copy.request] = copy
            if self.oldest_pin is None:
                self.oldest_pin = self._hook.now

    def _unpin(self, copy: OpenCopy) -> None:
        copy.pinned = None
        request = copy.request
        if request is not None and request not in self.awaited and self.by_request.get(request) is copy:
            del self.by_request[request]
        for each in self.by_request.values():
            if each.pinned is not None:
                self.oldest_pin = each.pinned
                return
        self.oldest_pin = None

    def _look(self) -> None:
        """Update `oldest` to the first running job that is not overdue; `by_job` is in the order of submission."""
        for copy in self.by_job.values():
            if copy.given is not None and copy.running and not copy.is_overdue:
                self.oldest = copy.submitted
                return
        self.oldest = None
