"""Which submitted jobs have taken too long (R16), and which lookups have waited too long (R14)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvoffload.model.ids import JobId, RequestId


class JobDeadlines:
    """Jobs in the order of their submission, so that only the oldest is ever looked at.

    Args:
        timeout_s: seconds from submission.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._due: deque[tuple[float, JobId]] = deque()

    def submitted(self, jobs: Iterable[JobId], now: float) -> None:
        """Jobs were handed to the workers."""
        self._due.extend((now + self._timeout_s, job) for job in jobs)

    def overdue(self, now: float) -> list[JobId]:
        """Hand over the jobs whose time is up, ended ones among them."""
        jobs = []
        while self._due and self._due[0][0] <= now:
            jobs.append(self._due.popleft()[1])
        return jobs


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
