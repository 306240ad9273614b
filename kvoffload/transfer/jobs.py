"""A pump's jobs, from acceptance to the report."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import CopyError, IllegalTransition
from kvoffload.model.wire import Direction, JobReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.model.ids import JobId
    from kvoffload.model.wire import DeviceJob
    from kvoffload.transfer.ports import Fence
    from kvoffload.transfer.runs import Numbers


@dataclass(slots=True, eq=False)
class OpenJob:
    """One accepted job. A load is one part; a store is cut into parts as the budget allows.

    Args:
        job: the job.
        accepted_at: time of acceptance on the pump's clock.
        fence: what its copies wait for.
        slots, blocks: of the job, as arrays; set by `resolve`.
        started: pairs handed to the copier so far.
        open_parts: open batches that contain a part of it.
        copy_s: seconds of the copies that have ended.
        failed: a part failed, so no further part starts.
        corrupt: positions of blocks whose host bytes differ from the stored ones.
    """

    job: DeviceJob
    accepted_at: float
    fence: Fence = None
    slots: Numbers = field(init=False)
    blocks: Numbers = field(init=False)
    started: int = 0
    open_parts: int = 0
    copy_s: float = 0.0
    failed: bool = False
    corrupt: tuple[int, ...] = ()

    @property
    def outcome(self) -> CopyOutcome:
        """How it ended, once it is over."""
        if self.corrupt:
            return CopyOutcome.CORRUPT
        return CopyOutcome.FAILED if self.failed else CopyOutcome.DONE

    @property
    def is_over(self) -> bool:
        """Whether no copy of it runs or will be started."""
        return self.open_parts == 0 and (self.failed or self.started == len(self.job.slots))

    def resolve(self, ready_slots: int, blocks: int) -> None:
        """Fill in the arrays.

        Raises:
            CopyError: the job is empty, uneven, or names a slot or a block that is not there.
        """
        job = self.job
        if len(job.targets) != len(job.slots) or not job.slots:
            raise CopyError(f"{len(job.slots)} slots do not pair with {len(job.targets)} blocks")
        slots, targets = _numbers(job.slots), _numbers(job.targets)
        _check_range("slot", slots, ready_slots)
        _check_range("block", targets, blocks)
        self.slots = slots
        self.blocks = targets


class Part(NamedTuple):
    """Pairs `start` to `end - 1` of a job."""

    job: OpenJob
    start: int
    end: int


def _numbers(ids: Sequence[int]) -> Numbers:
    """Return ids as a read-only array. Hooks call it, and it takes half as long as `np.fromiter`."""
    return np.ndarray((len(ids),), np.int64, struct.pack(f"{len(ids)}q", *ids))


class JobLedger:
    """Accepts jobs and returns reports; each accepted job is reported exactly once.

    The hook's thread accepts and reports; either thread may end a job. Each access to a container is one operation that is
    atomic in Python.
    """

    def __init__(self) -> None:
        self._open: dict[JobId, OpenJob] = {}
        self._ended: deque[JobReport] = deque()
        self._newest = dict.fromkeys(Direction, -1)

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._open)

    def accept(self, jobs: Sequence[DeviceJob], now: float) -> list[OpenJob]:
        """Accept all of `jobs`, which have one direction, or none. A plan that is received twice must not copy twice.

        Raises:
            IllegalTransition: a job was accepted before, or one with a higher number was; nothing changed.
        """
        direction = jobs[0].direction
        newest = self._newest[direction]
        for job in jobs:
            if job.id <= newest:
                raise IllegalTransition(f"transfer job {job.id}", "accepted", "submit")
            newest = job.id
        self._newest[direction] = newest
        accepted = [OpenJob(job, now) for job in jobs]
        self._open.update((open_job.job.id, open_job) for open_job in accepted)
        return accepted

    def end(self, open_job: OpenJob, now: float, slot_bytes: int) -> None:
        """Report a job that is over.

        `queue_s` is all time without copies: the wait for the limit, the fence and the checksums, and until the end was
        noticed.
        """
        job = open_job.job
        del self._open[job.id]
        outcome = open_job.outcome
        self._ended.append(
            JobReport(
                job=job.id,
                direction=job.direction,
                outcome=outcome,
                copied_bytes=len(job.slots) * slot_bytes if outcome is CopyOutcome.DONE else 0,
                queue_s=max(now - open_job.accepted_at - open_job.copy_s, 0.0),
                copy_s=open_job.copy_s,
                corrupt=open_job.corrupt,
            )
        )

    def take_reports(self) -> tuple[JobReport, ...]:
        """Return the jobs that ended since the last call, in the order in which they did."""
        return tuple(self._ended.popleft() for _ in range(len(self._ended)))


def _check_range(what: str, numbers: Numbers, end: int) -> None:
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= end:
        raise CopyError(f"{what} {low if low < 0 else high} is not among the {end} there are")
