"""Which submitted jobs have taken too long (R16), and which lookups have waited too long (R14)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvoffload.model.ids import JobId, RequestId
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.watchdog import Since


class JobDeadlines:
    """Jobs in the order of their submission, so that only the oldest is ever looked at.

    Args:
        clocks: where time comes from.
        timeout_s: seconds from submission.
        get: finds a job that has not ended on every rank, None for one that has.
    """

    def __init__(self, clocks: Clocks, timeout_s: float, get: Callable[[JobId], object | None]) -> None:
        self._clocks = clocks
        self._timeout_s = timeout_s
        self._get = get
        self._due: deque[tuple[Since, JobId]] = deque()
        self.oldest: Since | None = None
        """Since when the oldest job is under way, None without one; given-up ones do not count. Written whole, so
        another thread may read it."""

    def submitted(self, jobs: Iterable[JobId], now: float) -> None:
        """Jobs were handed to the workers."""
        since = Since(self._clocks.unix(), now)
        self._due.extend((since, job) for job in jobs)
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
        while self._due and self._get(self._due[0][1]) is None:
            self._due.popleft()
        self.oldest = self._due[0][0] if self._due else None


class Patience:
    """How long a request may be told "not yet".

    Args:
        timeout_s: seconds from the first such answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[RequestId, float] = {}

    def may_wait(self, request: RequestId, now: float) -> bool:
        """Whether a lookup may answer "not yet" once more."""
        since = self._since.get(request)
        return since is None or now - since < self._timeout_s

    def waits(self, request: RequestId, now: float) -> None:
        """A lookup answered "not yet"."""
        self._since.setdefault(request, now)

    def over(self, request: RequestId) -> None:
        """The request was admitted, or is gone."""
        self._since.pop(request, None)
