"""The jobs that workers were given and have not reported on every rank (R16).

Kept apart from the core's own records: were these to break, what workers may still touch must be known for certain (R12).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from msgspec import Struct

from kvoffload.model.ids import DeviceBlockId, JobId, Rank
from kvoffload.model.transfer import DeviceJob, Direction, TransferReport
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.watchdog import Since


class _Copy(Struct):
    job: DeviceJob
    running: set[Rank]
    is_overdue: bool = False


class OpenCopies:
    """Jobs between device and host in the order of their submission, so that only the oldest is ever asked for its age.

    Args:
        ranks: how many copy each job.
        clocks: where time comes from.
        timeout_s: seconds from submission after which a job is overdue.
    """

    def __init__(self, ranks: int, clocks: Clocks, timeout_s: float) -> None:
        self._ranks = frozenset(map(Rank, range(ranks)))
        self._clocks = clocks
        self._timeout_s = timeout_s
        self.open: dict[JobId, _Copy] = {}
        """Jobs that some rank still copies, overdue ones among them."""
        self._due: deque[tuple[Since, JobId]] = deque()
        self._counts = {(direction, is_overdue): 0 for direction in Direction for is_overdue in (False, True)}
        self.oldest: Since | None = None
        """Since when the oldest job is under way, None without one; overdue ones do not count. Written whole, so
        another thread may read it."""

    def submitted(self, jobs: Iterable[DeviceJob], now: float) -> None:
        """Jobs were handed to the workers."""
        since = Since(self._clocks.unix(), now)
        for job in jobs:
            self.open[job.id] = _Copy(job, set(self._ranks))
            self._due.append((since, job.id))
            self._counts[job.direction, False] += 1
        if self.oldest is None:
            self.oldest = since

    def reported(self, report: TransferReport) -> None:
        """A rank's copies have ended. A report that comes twice changes nothing."""
        for part in report.jobs:
            copy = self.open.get(part.job)
            if copy is not None:
                copy.running.discard(report.rank)
                if not copy.running:
                    del self.open[part.job]
                    self._counts[copy.job.direction, copy.is_overdue] -= 1
        self._look()

    def overdue(self, now: float) -> list[JobId]:
        """Hand over the jobs whose time is up, each once."""
        jobs = []
        while self._due and self._due[0][0].monotonic + self._timeout_s <= now:
            job = self._due.popleft()[1]
            if (copy := self.open.get(job)) is not None:
                copy.is_overdue = True
                self._counts[copy.job.direction, False] -= 1
                self._counts[copy.job.direction, True] += 1
                jobs.append(job)
        if jobs:
            self._look()
        return jobs

    def blocks(self) -> Counter[DeviceBlockId]:
        """Return how many open jobs touch each device block."""
        return Counter(block for copy in self.open.values() for block in copy.job.targets)

    def count(self, direction: Direction, *, is_overdue: bool) -> int:
        """Return how many jobs are under way, or overdue. Callable from any thread."""
        return self._counts[direction, is_overdue]

    def _look(self) -> None:
        """Jobs that were submitted before any open one need no deadline any more."""
        while self._due and self._due[0][1] not in self.open:
            self._due.popleft()
        self.oldest = self._due[0][0] if self._due else None
