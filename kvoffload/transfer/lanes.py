"""Submitted batches that have not ended, in the order in which their stream runs them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from kvoffload.logs import get_logger
from kvoffload.model.errors import DeviceLost
from kvoffload.transfer.ports import TicketState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffload.model.wire import Direction
    from kvoffload.transfer.jobs import Part
    from kvoffload.transfer.ports import Ticket

log = get_logger("transfer")

_OPEN = (TicketState.PENDING, TicketState.READING)


class Batch(Struct, eq=False):
    """One batch that was submitted to the copier.

    Args:
        ticket: the copier's ticket, or one that also handles checksums.
        parts: the job parts in this batch.
        size: bytes in this batch.
        copies: number of contiguous copies in this batch.
        submitted_at: when the batch was submitted, in seconds on the pump's clock.
        copy_s: seconds that the copies took; set when the batch ends.
        failed: whether the batch failed; set when the batch ends.
    """

    ticket: Ticket
    parts: tuple[Part, ...]
    size: int
    copies: int
    submitted_at: float
    copy_s: float = 0.0
    failed: bool = False

    def end(self, state: TicketState, now: float) -> Batch:
        """Record how the batch ended, and return the batch."""
        measured = self.ticket.copy_seconds
        self.copy_s = now - self.submitted_at if measured is None else measured
        self.failed = state is TicketState.FAILED
        return self


class Lane:
    """The batches of one direction that have not ended.

    A stream runs its batches in order, so a batch is queried only when its predecessor is no longer being copied. A
    batch that has not ended after `timeout_s` is no longer pending: later batches do not wait for it, and only
    `reap_late` queries it, rarely. The batch's jobs are not reported before it has ended, so its memory is not reused.

    `add` may run at the same time as any other method; the other methods must exclude each other.

    Attributes:
        lost: why this process can no longer use the device; None while it can.
    """

    def __init__(self, direction: Direction, timeout_s: float) -> None:
        self._direction = direction
        self._timeout_s = timeout_s
        self._pending: deque[Batch] = deque()
        self._abandoned: list[Batch] = []
        self.lost: str | None = None

    def __len__(self) -> int:
        """Return the number of pending batches, without batches that timed out."""
        return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        return sum([batch.size for batch in tuple(self._pending)])

    @property
    def is_started(self) -> bool:
        """Return whether all copies of the pending batches have been started."""
        return all(batch.ticket.is_started for batch in tuple(self._pending))

    @property
    def abandoned(self) -> int:
        """Return the number of batches that timed out and have not ended."""
        return len(self._abandoned)

    def add(self, batch: Batch) -> None:
        self._pending.append(batch)

    def reap(self, now: float) -> Iterator[Batch]:
        """Remove and yield the batches that have ended, oldest first, until one is still being copied."""
        for batch in tuple(self._pending):
            state = self._query(batch)
            is_open = state in _OPEN
            if is_open and now - batch.submitted_at <= self._timeout_s:
                if state is TicketState.PENDING:
                    return
                continue
            self._pending.remove(batch)
            if is_open:
                self._abandoned.append(batch)
                self._say(log.error, "abandoned", batch, timeout_s=self._timeout_s)
            else:
                yield batch.end(state, now)

    def reap_late(self, now: float) -> Iterator[Batch]:
        """Remove and yield the batches that have ended since they timed out."""
        for batch in tuple(self._abandoned):
            state = self._query(batch)
            if state not in _OPEN:
                self._abandoned.remove(batch)
                self._say(log.warning, "ended_late", batch)
                yield batch.end(state, now)

    def _query(self, batch: Batch) -> TicketState:
        try:
            state = batch.ticket.query()
        except Exception as error:  # The batch's jobs must end, whatever the copier raises.
            if isinstance(error, DeviceLost):
                self.lost = str(error)
            self._say(log.error, "failed", batch, reason=repr(error))
            return TicketState.FAILED
        if state is TicketState.FAILED:
            self._say(log.error, "failed", batch, reason="the copier reports a failure")
        return state

    def _say(self, say: Callable[..., object], what: str, batch: Batch, **more: object) -> None:
        jobs = [part.job.job.id for part in batch.parts]
        say(f"copy_{what}", direction=self._direction.value, jobs=jobs, **more)
