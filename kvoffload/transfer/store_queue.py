"""Stores that wait for the coroutine, and how they are cut into batches."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvoffload.transfer.jobs import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvoffload.transfer.jobs import OpenJob
    from kvoffload.transfer.store_bound import StoreBound


class StoreQueue:
    """Jobs in order of arrival; only the first may have been started in part.

    `add` may run beside the other methods, which must exclude each other.

    Args:
        bound: on the bytes of submitted stores.
        slot_bytes: bytes of one block.
    """

    def __init__(self, bound: StoreBound, slot_bytes: int) -> None:
        self._bound = bound
        self._slot_bytes = slot_bytes
        self._jobs: deque[OpenJob] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, jobs: Iterable[OpenJob]) -> None:
        self._jobs.extend(jobs)

    def next_batch(self, pending_bytes: int, usable: Callable[[OpenJob], bool]) -> list[Part]:
        """Take out what may be submitted now, at most half of the bound; nothing where there is no room.

        Args:
            pending_bytes: bytes of submitted stores that have not ended.
            usable: whether a job can be started; it is asked once for each part.
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
            job.started = end
            if end == len(job.job.slots):
                self._jobs.popleft()
        return parts

    def take_all(self) -> list[OpenJob]:
        """Take out every job, also the one that was started in part."""
        return [self._jobs.popleft() for _ in range(len(self._jobs))]

    def _pairs_that_fit(self, pending_bytes: int) -> int:
        bound = self._bound.bytes
        free = min(bound - pending_bytes, max(bound // 2, self._slot_bytes))
        pairs = max(free // self._slot_bytes, 0)
        return pairs if pending_bytes else max(pairs, 1)
