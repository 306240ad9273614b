"""Copies that never end must not take the device pool: beyond a bound no new copy is started (R5, R16)."""

from __future__ import annotations

from kvoffload.core.job import Job
from kvoffload.core.machine import JobState

_MOST_IN_A_ROW = 2


class Stall:
    """Counts abandoned copies, and says whether new ones may start.

    Args:
        limit: device blocks that abandoned copies may touch; a single job may always be abandoned.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._largest = 0
        self.blocks = 0
        """Device blocks under abandoned copies."""
        self.jobs_in_a_row = 0
        """Jobs abandoned since one last ended."""
        self.is_on = False
        """Whether no new copy may start."""

    @property
    def limit(self) -> int:
        """Device blocks that abandoned copies may touch: never less than one job of the largest size."""
        return max(self._limit, self._largest)

    def abandoned(self, job: Job) -> None:
        """A job was abandoned."""
        self.blocks += len(job.blocks)
        self._largest = max(self._largest, len(job.blocks))
        self.jobs_in_a_row += 1

    def ended(self, job: Job) -> None:
        """The last copy of a job is about to end; its blocks are still leased."""
        if job.state is JobState.ABANDONED:
            self.blocks -= len(job.blocks)
        self.jobs_in_a_row = 0

    def has_turned(self) -> bool:
        """Decide again whether copies may start; return whether the answer has changed."""
        was_on = self.is_on
        self.is_on = self.blocks > self.limit or self.jobs_in_a_row > _MOST_IN_A_ROW
        return self.is_on is not was_on
