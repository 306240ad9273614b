"""The jobs of a pump, from acceptance to the report."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import CopyError, IllegalTransition
from kvoffload.model.wire import Direction, JobReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.model.ids import JobId
    from kvoffload.model.wire import DeviceJob
    from kvoffload.transfer.ports import Fence
    from kvoffload.transfer.runs import Numbers


_UNRESOLVED = np.empty(0, np.int64)


class OpenJob(Struct, eq=False):
    """One accepted job. A load is submitted as one part, a store in as many parts as the limit on bytes requires.

    Args:
        job: the job.
        accepted_at: when the job was accepted, in seconds on the pump's clock.
        fence: the fence that the job's copies wait for.
        slots, blocks: the job's slots and blocks as arrays; set by `resolve`.
        started: how many of the job's blocks are in submitted parts.
        open_parts: how many batches with a part of the job have not ended.
        copy_s: seconds spent in copies that have ended.
        failed: whether the job failed; then no further part starts.
        corrupt: positions of blocks whose host bytes differ from the stored ones.
    """

    job: DeviceJob
    accepted_at: float
    fence: Fence = None
    slots: Numbers = _UNRESOLVED
    blocks: Numbers = _UNRESOLVED
    started: int = 0
    open_parts: int = 0
    copy_s: float = 0.0
    failed: bool = False
    corrupt: tuple[int, ...] = ()

    @property
    def outcome(self) -> CopyOutcome:
        """Return how the job ended. Call this only after the job is over."""
        if self.corrupt:
            return CopyOutcome.CORRUPT
        return CopyOutcome.FAILED if self.failed else CopyOutcome.DONE

    @property
    def is_over(self) -> bool:
        """Return whether no copy of the job is running or will be started."""
        return self.open_parts == 0 and (self.failed or self.started == len(self.job.slots))

    def resolve(self, ready_slots: int, blocks: int) -> None:
        """Set `slots` and `blocks`.

        Raises:
            CopyError: the job is empty, its slots and blocks differ in number, or a slot or block does not exist.
        """
        job = self.job
        if len(job.targets) != len(job.slots) or not job.slots:
            raise CopyError(f"{len(job.slots)} slots do not pair with {len(job.targets)} blocks")
        self.slots = _existing("slot", job.slots, ready_slots)
        self.blocks = _existing("block", job.targets, blocks)


class Part(NamedTuple):
    """Pairs of slot and block in a job, from position `start` to `end - 1`."""

    job: OpenJob
    start: int
    end: int


def _existing(what: str, ids: Sequence[int], end: int) -> Numbers:
    """Return ids as an array.

    Raises:
        CopyError: an id is not one of 0 to `end - 1`.
    """
    # A hook calls this function. No other two calls that refuse fractions are as short.
    try:
        numbers = np.frombuffer(array("Q", ids), np.uint64)
    except (OverflowError, TypeError):  # an id is negative, too large for any array, or no integer
        wrong = next((each for each in ids if not hasattr(each, "__index__") or each not in range(end)), ids)
        raise _absent(what, wrong, end) from None
    worst = ids[int(numbers.argmax())]
    if worst >= end:
        raise _absent(what, worst, end)
    return numbers.view(np.int64)


def _absent(what: str, wrong: object, end: int) -> CopyError:
    return CopyError(f"{what} {wrong!r} is not among the {end} that exist, which are numbered from 0")


class JobLedger:
    """Accepts jobs and returns reports; each accepted job is reported exactly once.

    The hook's thread accepts jobs and takes reports. Jobs end on the hook's thread or on the coroutine's thread.
    Containers are accessed only by single operations, which are atomic in Python.
    """

    def __init__(self) -> None:
        self._open: dict[JobId, OpenJob] = {}
        self._ended: deque[JobReport] = deque()
        self._newest = dict.fromkeys(Direction, -1)

    def __len__(self) -> int:
        """Return the number of jobs that have not ended."""
        return len(self._open)

    def accept(self, jobs: Sequence[DeviceJob], now: float) -> list[OpenJob]:
        """Accept `jobs`, all of one direction. Their ids must increase, so that a repeated plan is refused.

        Raises:
            IllegalTransition: a job with this id or a higher one was already accepted; nothing changed.
        """
        direction = jobs[0].direction
        newest = self._newest[direction]
        for job in jobs:
            if job.id <= newest:
                raise IllegalTransition(f"transfer job {job.id}", "accepted", "submit")
            newest = job.id
        self._newest[direction] = newest
        accepted = [OpenJob(job, now) for job in jobs]
        for open_job in accepted:
            self._open[open_job.job.id] = open_job
        return accepted

    def end(self, open_job: OpenJob, now: float, slot_bytes: int) -> None:
        """Report a job that is over.

        `queue_s` is the time without copies: the waits for the limit, the fence and the checksums, and the delay until
        the end is noticed.
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

    def fail_ended_loads(self) -> None:
        """Report loads as failed that ended and were not reported yet, because the device has lost their bytes.

        No job may be open.
        """
        for _ in range(len(self._ended)):
            report = self._ended.popleft()
            if report.direction is Direction.LOAD and report.outcome is CopyOutcome.DONE:
                report = replace(report, outcome=CopyOutcome.FAILED, copied_bytes=0)
            self._ended.append(report)

    def take_reports(self) -> tuple[JobReport, ...]:
        """Return the reports of jobs that ended since the last call, in the order in which they ended."""
        if not self._ended:
            return ()
        return tuple([self._ended.popleft() for _ in range(len(self._ended))])
