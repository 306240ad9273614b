"""Splits the spills and fetches of one rank and one tier into calls that may block, and reports how each job ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.wire import AnyJob, Direction, JobReport, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from structlog.stdlib import BoundLogger

    from kvoffload.model.ids import JobId
    from kvoffload.model.wire import DiskFile
    from kvoffload.transfer.blocking_calls import BlockingCalls, Call
    from kvoffload.transfer.checksums import Checksums


class TierReport(NamedTuple):
    """What a rank reports of a tier.

    Args:
        jobs: those that ended since the last report.
        works: calls are made.
        is_new: something of this was not reported before.
        file: the rank's slot file, if the tier is a disk and the file could be opened.
    """

    jobs: tuple[JobReport, ...]
    works: bool
    is_new: bool
    file: DiskFile | None = None


@dataclass(slots=True, eq=False)
class Part:
    """Some blocks of a job that one call copies, and how that ended.

    Args:
        job: the job.
        positions: of the blocks in it, in the order in which they are copied.
        whole: positions that were copied well.
        corrupt: positions whose bytes are not those that were written.
        under_call: positions that a call which hangs may still change, at their place or in the host.
        sums: of a spill to the disk, checksums by position.
    """

    job: AnyJob
    positions: Sequence[int]
    whole: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    under_call: Sequence[int] = ()
    sums: dict[int, int] = field(default_factory=dict)


def find_corrupt(part: Part, checksums: Checksums | None, log: BoundLogger) -> None:
    """Note and log which host slots of a part do not hold what was stored there. Called after their bytes were copied.

    A slot that is intact now was intact when it was copied, unless it belonged to another block in between: `Call.check` detects that.
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
    """What a call does. `positions_of` runs on the owner's thread, the others on one that may wait; see `blocking_calls.py`."""

    def positions_of(self, job: AnyJob) -> list[Sequence[int]]:
        """Return the positions of each part of a job."""

    def put(self, part: Part, call: Call, resource: Any) -> Part:  # noqa: ANN401
        """Copy host slots to the tier, but for those that do not hold what was stored there."""

    def get(self, part: Part, call: Call, resource: Any) -> Part:  # noqa: ANN401
        """Read a part's blocks into the calling thread's memory, and check them."""

    def fill(self, part: Part) -> Part:
        """Copy the correct blocks into their host slots. These are still the job's, because the thread has the call's token."""


@dataclass(slots=True, eq=False)
class _OpenJob:
    """A job with parts that have not ended.

    Args:
        job: the job.
        accepted_at: when it came.
        open_parts: how many have not ended.
        began, ended: when the first call did, and the last one so far.
        whole, corrupt, stuck: positions, of all parts that have ended.
        missing: the other positions of these parts, except for parts that were cancelled: the tier may have their blocks.
        is_cancelled: a part of it was.
        sums: checksums by position.
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

    def note(self, part: Part, call: Call) -> None:
        """Add a part that has ended. Its results count only if its call worked; otherwise a thread may still write them."""
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
        """Return how the job ended. A remote tier may have some of its blocks, a disk has all of them."""
        job, is_remote = self.job, self.job.tier is Tier.REMOTE
        copy_s = max(self.ended - self.began, 0.0)
        is_useful = self.whole and not self.is_cancelled and (is_remote or not self.missing)
        outcome = CopyOutcome.DONE if is_useful else CopyOutcome.FAILED
        if self.corrupt and not (is_remote and self.whole and job.direction is Direction.LOAD):
            outcome = CopyOutcome.CORRUPT
        is_done = outcome is CopyOutcome.DONE
        return JobReport(
            job=job.id,
            direction=job.direction,
            outcome=outcome,
            copied_bytes=len(self.whole) * slot_bytes if is_done or is_remote else 0,
            queue_s=max(now - self.accepted_at - copy_s, 0.0),
            copy_s=copy_s,
            corrupt=tuple(sorted(self.corrupt)),
            sums=tuple([self.sums[position] for position in sorted(self.sums)]) if is_done else (),
            stuck=tuple(sorted(self.stuck)),
            missing=tuple(sorted(self.missing)) if is_remote else (),
        )


class TierJobs:
    """The jobs of one rank and one tier. All methods are called on its owner's thread, that of the engine's hooks; none waits.

    Args:
        calls: to the tier; `close` closes them.
        mover: what a call does.
        slot_bytes: of a host slot.
        monotonic: time in seconds.
    """

    def __init__(
        self, calls: BlockingCalls[Any], mover: Mover, slot_bytes: int, monotonic: Callable[[], float]
    ) -> None:
        self.calls = calls
        self._mover = mover
        self._slot_bytes = slot_bytes
        self._monotonic = monotonic
        self._reports: list[JobReport] = []
        self._reported: bool | None = None

    def submit(self, jobs: Iterable[AnyJob]) -> None:
        """Queue jobs; those that cannot be started end as failed."""
        for job in jobs:
            parts = [Part(job, positions) for positions in self._mover.positions_of(job)]
            opened = _OpenJob(job, self._monotonic(), len(parts))
            is_put = job.direction is Direction.STORE
            copy, use = (self._mover.put, None) if is_put else (self._mover.get, self._mover.fill)
            for part in parts:
                ended = partial(self._part_ended, opened, part)
                self.calls.submit(partial(copy, part), ended, use, is_write=is_put, job=job.id)

    def cancel(self, jobs: Collection[JobId]) -> None:
        """End fetches that no request waits for any more: begin no more of their reads."""
        self.calls.cancel(jobs)

    def take(self) -> TierReport | None:
        """Return what ended since the last call, None before the tier is known."""
        self.calls.poll()
        return self._report()

    def _report(self, file: DiskFile | None = None) -> TierReport:
        reports = tuple(self._reports)
        self._reports = []
        works = self.calls.works
        is_new = bool(reports) or works is not self._reported
        self._reported = works
        return TierReport(reports, works, is_new, file)

    def close(self) -> None:
        """Take no more jobs."""
        self.calls.close()

    def _part_ended(self, opened: _OpenJob, part: Part, call: Call) -> None:
        opened.note(part, call)
        if not opened.open_parts:
            self._reports.append(opened.report(self._monotonic(), self._slot_bytes))
