"""The open copies: one record for each, from its pin or its plan to its last report.

Hooks enter what the engine waits for and what workers may still touch by calls, not by events, so that it is complete even
when the core breaks (R12). Events only add what operators and `NetBenefit` read.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Clocks:
    """The times that the scheduler's side reads, and what its coroutines sleep on.

    Args:
        monotonic: seconds, for time limits and durations. A hook reads it as it begins and as it ends.
        unix: seconds since 1970, for people.
        sleep: waits for seconds.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class HookTime(Struct):
    """The time of the current hook. The hook sets it, so that nothing inside the hook reads a clock.

    Args:
        now: when it began, in monotonic seconds.
        spent: seconds that each hook took in this step.
    """

    now: float = -math.inf
    spent: defaultdict[Hook, float] = field(default_factory=lambda: defaultdict(float))


CopyEnded: TypeAlias = events.LoadEnded | events.TierCopyEnded


class OpenCopy(Struct, eq=False):
    """A load, a store, or a fetch for a request. Times are monotonic seconds, None where there is none.

    Args:
        request: whose load or fetch; None for a store.
        pinned: since when the host's blocks are pinned for it.
        job: its number, once planned.
        tokens: that a load or fetch brings.
        planned: when a load or fetch was planned, until its wait was added up.
        copy_s: copy time of the ranks together.
        given: the job as the workers got it.
        submitted: when they got it.
        running: ranks that still copy.
        is_overdue: whether its time is up.
        has_ended: whether the core expects nothing more of it.
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
    """Loads that ended, each started load once, also of requests that are gone.

    Args:
        loaded, failed: their requests.
        without_copy: those among them whose load no worker was given, so that no worker reports it.
        abandoned: jobs of answered loads that workers still copy.
    """

    loaded: list[RequestId] = []
    failed: list[RequestId] = []
    without_copy: list[RequestId] = []
    abandoned: list[JobId] = []


NO_ANSWERS = LoadAnswers()
"""The answers in most steps. It stays empty."""


class OpenCopies:
    """The table of open copies: by job, and by request while a pin is held for it or the engine waits for it.

    Args:
        ranks: how many copy each job.
        timeout_s: seconds from submission after which a job is overdue.
        jobs: the core's, to see which are left from before a reset.
        hook: the current hook's time.
        bus: source of events; ends of resets are published on it.

    Attributes:
        on_end: called with each load or fetch that ends, and the event of its end.
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
        # Other threads read these three, which are replaced and never changed.
        self.oldest: float | None = None
        """When the oldest job was submitted, None without one; overdue jobs do not count."""
        self.oldest_pin: float | None = None
        """When the oldest pin began, None without one."""
        self.draining = 0
        """How many jobs from before the last reset have not ended. Their results are dropped."""
        self._epoch = 0
        self._from_before_reset: set[JobId] = set()
        bus.count(events.HitPinned, self._hit_pinned)
        bus.count(events.HitDropped, self._hit_dropped)
        bus.count(events.LoadScheduled, self._load_scheduled)
        bus.count(events.LoadEnded, self._load_ended)
        bus.count(events.TierCopyScheduled, self._fetch_scheduled)
        bus.count(events.TierCopyEnded, self._fetch_ended)
        bus.count(events.ResetStarted, self._reset_started)

    # -- what hooks say -----------------------------------------------------------------------------------------

    def awaits(self, request: RequestId) -> None:
        """Note that the engine waits for a load."""
        copy = self.by_request.get(request)
        if copy is None or copy.job is not None:
            self.by_request[request] = OpenCopy(request)
        self.awaited[request] = None

    def submitted(self, jobs: Iterable[DeviceJob]) -> None:
        """Note that the workers get these jobs."""
        now = self._hook.now
        for job in jobs:
            copy = self.by_job.get(job.id)
            if copy is None:  # a store, or a load whose event was lost: no event tells its end
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
        """Note that a rank's copies have ended. A duplicate report changes nothing."""
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
        """Return the jobs whose time is up, each once."""
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

    def answer(self, results: LoadResults) -> LoadAnswers:
        """Return the ended loads that the engine still waits for."""
        answers = LoadAnswers()
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
        return answers

    def look_at_reset(self) -> None:
        """Publish the end of the last reset once no job from before it is waited for. Abandoned jobs are not."""
        states = [job.state for number, job in self._jobs.open.items() if number in self._from_before_reset]
        abandoned = states.count(JobState.ABANDONED)
        self.draining = len(states) - abandoned
        if not self.draining:
            self._bus.publish(events.ResetEnded(self._epoch, abandoned))

    def forget_events(self) -> None:
        """Keep only what workers copy and what the engine waits for: no more events will come."""
        self.by_job = {
            job: copy for job, copy in self.by_job.items() if copy.running and copy.given is not None
        }
        self.by_request = {request: self.by_request[request] for request in self.awaited}
        for copy in (*self.by_job.values(), *self.by_request.values()):
            copy.has_ended = True
            copy.pinned = copy.planned = None
        self.oldest_pin = None
        self.draining = 0

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[DeviceJob]:
        """The jobs that some rank still copies, including overdue ones."""
        return [copy.given for copy in self.by_job.values() if copy.running and copy.given is not None]

    def blocks(self) -> Counter[DeviceBlockId]:
        """Return how many running jobs touch each device block."""
        return Counter(block for job in self.running for block in job.targets)

    def count(self, direction: Direction, *, is_overdue: bool) -> int:
        """Return how many jobs are under way, or overdue. Callable from any thread."""
        return self._counts[direction, is_overdue]

    # -- what events add ----------------------------------------------------------------------------------------

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

    # -- inside -------------------------------------------------------------------------------------------------

    def _pin(self, copy: OpenCopy) -> None:
        """Keep the table by request in the order of the pins."""
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
        """Update `oldest`. The table by job is in the order of submission."""
        for copy in self.by_job.values():
            if copy.given is not None and copy.running and not copy.is_overdue:
                self.oldest = copy.submitted
                return
        self.oldest = None
