"""The stores that wait for the coroutine, and their division into batches."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvoffload.model.limit import AdaptiveLimit
from kvoffload.transfer.jobs import Part
from kvoffload.transfer.ports import HELD_COPIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvoffload.transfer.jobs import OpenJob
    from kvoffload.transfer.lanes import Batch

# The highest limit divided by this number is the lowest limit, and also the step. If the limit allowed less than a
# batch or two, stores would wait for the coroutine's next turn.
_PARTS = 8
_LOCK_S = 0.01  # extra time that a batch enqueued in several calls may spend waiting for the GIL


class StoreQueue:
    """Jobs in order of arrival; only the first job may have been submitted in part.

    `add` may run at the same time as any other method; the other methods must exclude each other.

    Args:
        most: the highest limit on the bytes of submitted stores.
        slot_bytes: bytes of one block on this rank. The limit always allows two blocks if `most` does.

    Attributes:
        limit: the adaptive limit on the bytes of submitted stores.
    """

    def __init__(self, most: int, slot_bytes: int) -> None:
        self._least = min(max(most // _PARTS, 2 * slot_bytes), most)
        self.limit = AdaptiveLimit(most, self._least, max(most // _PARTS, slot_bytes))
        self._slot_bytes = slot_bytes
        self._jobs: deque[OpenJob] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, jobs: Iterable[OpenJob]) -> None:
        self._jobs.extend(jobs)

    def next_batch(self, pending_bytes: int, usable: Callable[[OpenJob], bool]) -> list[Part]:
        """Return the parts to submit now: at most half of the limit, nothing if there is no room.

        A job is removed with its last part. The caller counts the parts in `OpenJob.started` before it calls again.

        Args:
            pending_bytes: bytes of submitted stores that have not ended.
            usable: returns whether a job can be copied; called once for each part.
        """
        room = self._pairs_that_fit(pending_bytes)
        parts: list[Part] = []
        while self._jobs and room > 0:
            job = self._jobs[0]
            if job.failed or not usable(job):
                self._jobs.popleft()
                continue
            end = min(len(job.job.slots), job.started + room)
            parts.append(Part(job, job.started, end))
            room -= end - job.started
            if end == len(job.job.slots):
                self._jobs.popleft()
        return parts

    def batch_ended(self, batch: Batch, now: float, *, is_load_pending: bool) -> None:
        """Adapt the limit to the speed of an ended batch, compared with batches whose copies are about as large.

        Args:
            batch: the batch, which did not fail.
            now: when its end was noticed, in seconds on the pump's clock.
            is_load_pending: whether a load was pending when its end was noticed.
        """
        # Small batches are not measured, because starting a batch takes longer than its copies.
        is_measured = 2 * batch.size >= self._least
        self.limit.ended(
            batch.size,
            batch.copy_s if is_measured else 0.0,
            (batch.size // batch.copies).bit_length(),
            began=batch.submitted_at,
            now=now,
            beside_load=is_load_pending,
            noise_s=0.0 if batch.copies <= HELD_COPIES else _LOCK_S,
        )

    def take_all(self) -> list[OpenJob]:
        """Remove and return every job, including one that was submitted in part."""
        return [self._jobs.popleft() for _ in range(len(self._jobs))]

    def _pairs_that_fit(self, pending_bytes: int) -> int:
        limit = int(self.limit.value)
        free = min(limit - pending_bytes, max(limit // 2, self._slot_bytes))
        pairs = max(free // self._slot_bytes, 0)
        return pairs if pending_bytes else max(pairs, 1)
