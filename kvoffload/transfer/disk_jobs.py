"""Jobs on a rank's disk while their copies run: how each copy ended, and what the report of its job says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.transfer import Direction, DiskJob, JobReport


@dataclass(slots=True, eq=False)
class DiskCopy:
    """Some slots of a job that one thread copies, and how that ended.

    Args:
        owner: the job.
        positions: of the slots in it, in the order of their places in the file.
        token: what a thread takes to end the copy; empty once one has.
        began, ended: when the thread did.
        called_at: when its last call to the disk began.
        under_call: the positions of that call.
        is_done: it ended well, but for what is corrupt.
        corrupt, sums: as of the job.
        is_stuck: the hook's thread has ended it, because the call does not return.
    """

    owner: OpenDiskJob
    positions: Sequence[int]
    token: list[None] = field(default_factory=lambda: [None])
    began: float = 0.0
    ended: float = 0.0
    called_at: float = inf
    under_call: Sequence[int] = ()
    is_done: bool = False
    corrupt: Sequence[int] = ()
    sums: dict[int, int] = field(default_factory=dict)
    is_stuck: bool = False

    def claim(self) -> bool:
        """Take the token; False where it is taken."""
        try:
            self.token.pop()
        except IndexError:
            return False
        return True

    def enter(self, positions: Sequence[int], now: float) -> bool:
        """Note that a call begins; False where the hook's thread has ended the copy, so that it must not begin."""
        self.under_call, self.called_at = positions, now
        # After the note: the hook's thread takes the token before it reads which places the call may change.
        return bool(self.token)


@dataclass(slots=True, eq=False)
class OpenDiskJob:
    """A job of which copies have not ended.

    Args:
        job: the job.
        accepted_at: when it came.
        open_copies: how many have not ended.
        failed: one of them failed.
        is_cancelled: no more copies of it begin.
        began, ended: when the first copy did, and the last one so far.
        corrupt: positions whose bytes are not those that were written.
        stuck: positions under a call that hangs, if it may still change the place, or the host slot.
        sums: of a spill, checksums by position.
    """

    job: DiskJob
    accepted_at: float
    open_copies: int = 0
    failed: bool = False
    is_cancelled: bool = False
    began: float = inf
    ended: float = 0.0
    corrupt: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    sums: dict[int, int] = field(default_factory=dict)

    def note(self, copy: DiskCopy, *, are_in_place: bool) -> None:
        """Add the end of a copy.

        Args:
            copy: which.
            are_in_place: reads go into the host slots themselves.
        """
        self.open_copies -= 1
        if copy.ended:
            self.began = min(self.began, copy.began)
            self.ended = max(self.ended, copy.ended)
        self.failed |= not copy.is_done or copy.is_stuck
        self.corrupt += copy.corrupt
        if copy.is_stuck and (are_in_place or self.job.direction is Direction.STORE):
            self.stuck += copy.under_call
        self.sums.update(copy.sums)

    def report(self, now: float, slot_bytes: int) -> JobReport:
        """Return how the job ended."""
        copy_s = max(self.ended - self.began, 0.0)
        outcome = CopyOutcome.FAILED if self.failed else CopyOutcome.DONE
        if self.corrupt:
            outcome = CopyOutcome.CORRUPT
        is_done = outcome is CopyOutcome.DONE
        return JobReport(
            job=self.job.id,
            direction=self.job.direction,
            outcome=outcome,
            copied_bytes=len(self.job.slots) * slot_bytes if is_done else 0,
            queue_s=max(now - self.accepted_at - copy_s, 0.0),
            copy_s=copy_s,
            corrupt=tuple(sorted(self.corrupt)),
            sums=tuple([self.sums[position] for position in sorted(self.sums)]) if is_done else (),
            stuck=tuple(sorted(self.stuck)),
        )
