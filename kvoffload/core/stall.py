"""Copies that never end must not take the device pool: beyond a bound on them no new copy is begun (R5, R16)."""

from __future__ import annotations

from kvoffload.core.jobs import Job
from kvoffload.model.transfer import Direction

_MOST_IN_A_ROW = 2


class Stall:
    """Follows the copies between device and host that were given up, and says whether to begin new ones.

    Args:
        limit: device blocks that they may touch; a single job may always be given up.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._largest = 0
        self.blocks = 0
        """Device blocks under copies that were given up."""
        self.jobs_in_a_row = 0
        """Jobs given up since one last ended."""
        self.is_on = False
        """Whether no new copy may begin."""

    @property
    def limit(self) -> int:
        """Device blocks that copies which were given up may touch: never less than one job of the largest size."""
        return max(self._limit, self._largest)

    def abandoned(self, job: Job) -> None:
        """A job was given up."""
        if job.direction is not Direction.CHECK:
            self.blocks += len(job.blocks)
            self._largest = max(self._largest, len(job.blocks))
            self.jobs_in_a_row += 1

    def ended(self, job: Job, *, was_abandoned: bool) -> None:
        """The last copy of a job has ended."""
        if job.direction is not Direction.CHECK:
            self.blocks -= len(job.blocks) if was_abandoned else 0
            self.jobs_in_a_row = 0

    def has_turned(self) -> bool:
        """Decide anew whether copies may begin; return whether that is another answer than before."""
        was_on = self.is_on
        self.is_on = self.blocks > self.limit or self.jobs_in_a_row > _MOST_IN_A_ROW
        return self.is_on is not was_on
