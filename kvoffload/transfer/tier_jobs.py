"""Splits the spills and fetches of one rank and one tier into calls that may block, and reports how each job ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvoffload.model.causes import CopyOutcome, RemoteFault
from kvoffload.model.wire import AnyJob, Direction, JobReport, Tier, TierStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from structlog.stdlib import BoundLogger

    from kvoffload.model.ids import JobId
    from kvoffload.model.wire import SlotsFile
    from kvoffload.transfer.blocking_calls import BlockingCalls, Call
    from kvoffload.transfer.checksums import Checksums


class TierReport(NamedTuple):
    """A rank's report about one tier.

    Args:
        jobs: reports of the jobs that ended since the last report.
        is_new: whether a job has ended or `status.works` has changed since the last report.
        status: the rank's calls to the tier.
    """

    jobs: tuple[JobReport, ...]
    is_new: bool
    status: TierStatus


@dataclass(slots=True, eq=False)
class TierPart:
    """The blocks of a job that one call copies, and the call's results.

    Args:
        job: the job.
        positions: positions of the part's blocks in the job, in the order of the copies.
        whole: positions that were copied successfully.
        corrupt: positions whose bytes differ from the stored ones.
        under_call: positions whose slots a hanging call may still change: a file slot in a spill, a host slot in a
            fetch.
        sums: for a spill to the disk, the checksums by position.
        refused: why the tier did not take some of the blocks; None if it took all.
        torn: how many blocks were overwritten while they were copied from another engine's memory.
    """

    job: AnyJob
    positions: Sequence[int]
    whole: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    under_call: Sequence[int] = ()
    sums: dict[int, int] = field(default_factory=dict)
    refused: RemoteFault | None = None
    torn: int = 0


def find_corrupt(part: TierPart, checksums: Checksums | None, log: BoundLogger) -> None:
    """Record and log a part's host slots whose bytes have changed. Call this after the bytes were copied.

    A slot that is intact after the copy was also intact during the copy, unless the slot was reused in between, which
    `Call.check` detects.
    """
    if checksums is None:
        return
    slots = [part.job.slots[position] for position in part.positions]
    wrong = checksums.changed(slots)
    if wrong:
        part.corrupt = [part.positions[index] for index in wrong]
        bad = [slots[index] for index in wrong]
        log.error("blocks_corrupt", job=part.job.id, blocks=len(wrong), slots=bad)


class Mover(Protocol):
    """Copies the parts of jobs. `positions_of` runs on the owner's thread, the other methods on calls' threads."""

    def positions_of(self, job: AnyJob) -> list[Sequence[int]]:
        """Return the positions of the blocks in each part of a job."""

    def put(self, part: TierPart, call: Call, resource: Any) -> TierPart:  # noqa: ANN401
        """Copy a part's host slots to the tier, skipping host slots whose bytes have changed."""

    def get(self, part: TierPart, call: Call, resource: Any) -> TierPart:  # noqa: ANN401
        """Read a part's blocks into memory that only this call uses, and verify them."""

    def fill(self, part: TierPart) -> TierPart:
        """Copy the correct blocks into their host slots.

        The slots still belong to the job, because the calling thread holds the call's token.
        """


@dataclass(slots=True, eq=False)
class _OpenTierJob:
    """A job with parts that have not ended.

    Args:
        job: the job.
        accepted_at: when the job was submitted.
        open_parts: how many parts have not ended.
        began, ended: when the job's first call began, and when its last call ended.
        whole, corrupt: the positions copied successfully and the corrupt positions, in all parts that have ended.
        missing: positions in ended parts that are neither whole nor corrupt. Cancelled parts are left out, because the
            tier may have their blocks.
        stuck: positions whose slots may still be changed by a hanging call.
        sums: checksums by position.
        is_cancelled: whether a part was cancelled.
    """

    job: AnyJob
    accepted_at: float
    open_parts: int
    began: float = inf
    ended: float = 0.0
    whole: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    sums: dict[int, int] = field(default_factory=dict)
    is_cancelled: bool = False

    def note(self, part: TierPart, call: Call) -> None:
        """Add an ended part.

        The part's results count only if its call succeeded; a hanging call's thread may still change them.
        """
        self.open_parts -= 1
        if call.was_made:
            self.began = min(self.began, call.began)
            self.ended = max(self.ended, call.began + call.took)
        if call.is_cancelled and not call.was_made:
            self.is_cancelled = True
            return
        if call.result is None:
            self.missing += part.positions
            if call.is_stuck:
                self.stuck += part.under_call
            return
        self.whole += part.whole
        self.corrupt += part.corrupt
        self.missing += set(part.positions).difference(part.whole, part.corrupt)
        self.sums.update(part.sums)

    def report(self, now: float, slot_bytes: int) -> JobReport:
        """Return the job's report.

        If the engine manages the tier's slots, a job succeeds only if all blocks were copied. Otherwise the tier may
        have lost some of the blocks, and a job succeeds if any block was copied.
        """
        job, may_lack = self.job, not self.job.tier.has_slots
        copy_s = max(self.ended - self.began, 0.0)
        is_useful = self.whole and not self.is_cancelled and (may_lack or not self.missing)
        outcome = CopyOutcome.DONE if is_useful else CopyOutcome.FAILED
        if self.corrupt and not (may_lack and self.whole and job.direction is Direction.LOAD):
            outcome = CopyOutcome.CORRUPT
        is_done = outcome is CopyOutcome.DONE
        return JobReport(
            job=job.id,
            direction=job.direction,
            outcome=outcome,
            copied_bytes=len(self.whole) * slot_bytes if is_done or may_lack else 0,
            queue_s=max(now - self.accepted_at - copy_s, 0.0),
            copy_s=copy_s,
            corrupt=tuple(sorted(self.corrupt)),
            sums=tuple([self.sums[position] for position in sorted(self.sums)]) if is_done else (),
            stuck=tuple(sorted(self.stuck)),
            missing=tuple(sorted(self.missing)) if may_lack else (),
        )


class TierJobs:
    """The jobs of one rank and one tier. Call all methods on the thread of the engine's hooks; none of them blocks.

    Args:
        tier: the tier.
        calls: makes the calls to the tier. `close` closes `calls`.
        mover: copies the parts of jobs within these calls.
        slot_bytes: bytes of a host slot on this rank.
        monotonic: returns the time in seconds.
    """

    def __init__(
        self,
        tier: Tier,
        calls: BlockingCalls[Any],
        mover: Mover,
        slot_bytes: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._tier = tier
        self.calls = calls
        self._mover = mover
        self._slot_bytes = slot_bytes
        self._monotonic = monotonic
        self._reports: list[JobReport] = []
        self._reported: bool | None = None

    def submit(self, job: AnyJob) -> None:
        """Queue a job. A job that cannot be started is reported as failed."""
        parts = [TierPart(job, positions) for positions in self._mover.positions_of(job)]
        opened = _OpenTierJob(job, self._monotonic(), len(parts))
        is_put = job.direction is Direction.STORE
        copy, use = (self._mover.put, None) if is_put else (self._mover.get, self._mover.fill)
        for part in parts:
            ended = partial(self._part_ended, opened, part)
            self.calls.submit(partial(copy, part), ended, use, is_write=is_put, job=job.id)

    def cancel(self, jobs: Collection[JobId]) -> None:
        """Start no further reads for the fetches `jobs`. Call this when no request waits for them."""
        self.calls.cancel(jobs)

    def take(self) -> TierReport | None:
        """Report the jobs that ended since the last call. Return None before the tier has opened or failed."""
        self.calls.poll()
        return self._report()

    def _report(self, file: SlotsFile | None = None) -> TierReport:
        reports = tuple(self._reports)
        self._reports = []
        works = self.calls.works
        is_new = bool(reports) or works is not self._reported
        self._reported = works
        return TierReport(reports, is_new, TierStatus(self._tier, works, file, self._faults()))

    def _faults(self) -> tuple[int, ...]:
        """Return `TierStatus.faults`."""
        return tuple(self.calls.faults.values())

    def close(self) -> None:
        """Accept no more jobs."""
        self.calls.close()

    def _part_ended(self, opened: _OpenTierJob, part: TierPart, call: Call) -> None:
        opened.note(part, call)
        if not opened.open_parts:
            self._reports.append(opened.report(self._monotonic(), self._slot_bytes))
