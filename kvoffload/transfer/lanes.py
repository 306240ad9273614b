"""Submitted batches, in the order in which their stream runs them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(slots=True, eq=False)
class Batch:
    """One submission.

    Args:
        ticket: the copier's, or one that reads checksums after it.
        parts: of the jobs in it.
        size: its bytes.
        copies: contiguous copies in it.
        submitted_at: when, on the pump's clock.
        copy_s: seconds that its copies took, once it has ended.
        failed: whether it ended badly.
    """

    ticket: Ticket
    parts: tuple[Part, ...]
    size: int
    copies: int
    submitted_at: float
    copy_s: float = 0.0
    failed: bool = False

    def end(self, state: TicketState, now: float) -> Batch:
        """Note how it ended; return it."""
        measured = self.ticket.copy_seconds
        self.copy_s = now - self.submitted_at if measured is None else measured
        self.failed = state is TicketState.FAILED
        return self


class Lane:
    """The batches of one direction.

    A stream runs in order, so no batch is queried whose predecessor is still being copied. A batch that has not ended after
    `timeout_s` is set aside: it is no longer work, nothing waits behind it, and `reap_late` queries it seldom. Its memory
    stays out of use until it has ended, because no report says that it has.

    `add` may run beside the other methods, which must exclude each other.

    Attributes:
        lost: why the device runs nothing more of this process, None while it does.
    """

    def __init__(self, direction: Direction, timeout_s: float) -> None:
        self._direction = direction
        self._timeout_s = timeout_s
        self._pending: deque[Batch] = deque()
        self._abandoned: list[Batch] = []
        self.lost: str | None = None

    def __len__(self) -> int:
        """Pending batches, without those that timed out."""
        return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the pending batches."""
        return sum([batch.size for batch in tuple(self._pending)])

    @property
    def abandoned(self) -> int:
        """Batches that timed out and have not ended."""
        return len(self._abandoned)

    def add(self, batch: Batch) -> None:
        self._pending.append(batch)

    def reap(self, now: float) -> Iterator[Batch]:
        """Remove and yield the batches that have ended, oldest first, up to the first that is still being copied."""
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
        """Remove and yield the batches that timed out and have ended since."""
        for batch in tuple(self._abandoned):
            state = self._query(batch)
            if state not in _OPEN:
                self._abandoned.remove(batch)
                self._say(log.warning, "ended_late", batch)
                yield batch.end(state, now)

    def _query(self, batch: Batch) -> TicketState:
        try:
            state = batch.ticket.query()
        except Exception as error:  # the job must end, whatever a copier raises
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
