"""Which submitted jobs have taken too long (R16)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from kvoffload.model.ids import JobId
from kvoffload.model.transfer import TransferJob
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.watchdog import Since


class JobDeadlines:
    """Jobs in the order of their submission, so that only the oldest is ever looked at.

    Args:
        clocks: where time comes from.
        timeout_s: seconds from submission.
        open_jobs: the jobs that some rank still copies.
    """

    def __init__(self, clocks: Clocks, timeout_s: float, open_jobs: Collection[JobId]) -> None:
        self._clocks = clocks
        self._timeout_s = timeout_s
        self._open = open_jobs
        self._due: deque[tuple[Since, JobId]] = deque()
        self.oldest: Since | None = None
        """Since when the oldest job is under way, None without one; abandoned ones do not count. Written whole, so
        another thread may read it."""

    def submitted(self, jobs: Iterable[TransferJob], now: float) -> None:
        """Jobs were handed to the workers."""
        since = Since(self._clocks.unix(), now)
        self._due.extend([(since, job.job) for job in jobs])
        self.forget_ended()

    def overdue(self, now: float) -> list[JobId]:
        """Hand over the jobs whose time is up, ended ones among them."""
        jobs = []
        while self._due and self._due[0][0].monotonic + self._timeout_s <= now:
            jobs.append(self._due.popleft()[1])
        if jobs:
            self.forget_ended()
        return jobs

    def forget_ended(self) -> None:
        """Jobs have ended: those that were submitted before any open one need no deadline any more."""
        while self._due and self._due[0][1] not in self._open:
            self._due.popleft()
        self.oldest = self._due[0][0] if self._due else None
