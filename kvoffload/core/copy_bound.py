"""The limit on blocks that the disk's background copies hold at a time, adapted to how they disturb other work.

Like the bound on stores for the bus (`transfer/store_bound.py`), with the core's observations: a spill that ends while a load
or a fetch is open ran beside it, and one that takes twice as long a block as the best of its size shares the disk with other
work. Either halves the limit, once for all spills planned before; a spill without either raises it by an eighth.
"""

from __future__ import annotations

from kvoffload.core.job import Job
from kvoffload.model.ids import JobId

_MOST_BYTES = (
    64 * 2**20
)  # a rank's part of it: what a load or a fetch may find before it on a disk, some 50 ms
_LEAST_SHARE = _STEP = 1 / 8
_SLOW = 2.0  # times the best
_FORGET = 0.98  # of the best speed, with each spill: a faster moment is no measure for good


class CopyBound:
    """How many blocks may be under way."""

    def __init__(self) -> None:
        self.slot_bytes = 1
        """The most that any rank has reported."""
        self.share = 1.0
        """The limit as a share of its most."""
        self._cut_at = JobId(-1)
        self._best: dict[int, float] = {}  # seconds a block, by the magnitude of the job

    def slots(self, capacity: int) -> int:
        """Return the limit for a host of this capacity, of which it is an eighth at most."""
        most = min(_MOST_BYTES // self.slot_bytes, capacity // 8)
        return max(int(most * self.share), 1)

    def ended(self, job: Job, last: JobId, *, is_load_open: bool) -> None:
        """Take note of a spill that every rank has written.

        Args:
            job: which.
            last: the job that was planned last.
            is_load_open: whether a load or a fetch is under way.
        """
        if not self._is_slow(job) and not is_load_open:
            self.share = min(self.share + _STEP, 1.0)
        elif job.job > self._cut_at:
            self.share = max(self.share / 2, _LEAST_SHARE)
            self._cut_at = last

    def _is_slow(self, job: Job) -> bool:
        seconds, size = job.copy_s / len(job.slots), len(job.slots).bit_length()
        best = min(self._best.get(size, seconds) / _FORGET, seconds)
        self._best[size] = best
        return seconds > _SLOW * best
