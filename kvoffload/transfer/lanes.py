"""Submitted batches, in the order in which their stream runs them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvoffload.logs import get_logger
from kvoffload.model.errors import DeviceLost
from kvoffload.model.wire import Direction
from kvoffload.transfer.ports import TicketState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffload.transfer.jobs import Part
    from kvoffload.transfer.ports import Ticket

log = get_logger("transfer")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One submission.

    Args:
        ticket: the copier's, or that of the checksums.
        direction: of all its copies.
        parts: of the jobs in it.
        size: its bytes.
        copies: contiguous copies in it.
        submitted_at: when, on the pump's clock; of a batch whose checksums are read, when its copies were.
    """

    ticket: Ticket
    direction: Direction
    parts: tuple[Part, ...]
    size: int
    copies: int
    submitted_at: float


@dataclass(frozen=True, slots=True)
class EndedBatch:
    """A batch that touches no memory any more, and the seconds that its copies took."""

    batch: Batch
    failed: bool
    copy_s: float


class Lane:
    """The batches of one direction: those of its copies, or those of its checksums.

    A stream runs in order, so only its oldest batch is asked. A batch that stays pending for longer than `timeout_s` is
    set aside: it is no longer work, nothing waits behind it, and it is asked seldom, by `reap_late`. Its memory stays
    out of use for as long as it has not ended, because no report says that it has.

    `add` may run beside the other methods, which must exclude each other; each count has one writer.

    Attributes:
        batches: batches added so far.
        copies: contiguous copies in them.
        queries: questions put to tickets.
        lost: why the device runs nothing more of this process, None while it does.
    """

    def __init__(self, direction: Direction, timeout_s: float, work: str = "copy") -> None:
        self._direction = direction
        self._work = work
        self._timeout_s = timeout_s
        self._pending: deque[Batch] = deque()
        self._written_off: list[Batch] = []
        self._added_bytes = 0
        self._removed_bytes = 0
        self.batches = 0
        self.copies = 0
        self.queries = 0
        self.lost: str | None = None

    def __len__(self) -> int:
        """Pending batches; those that were written off are not among them."""
        return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the pending batches."""
        return self._added_bytes - self._removed_bytes

    @property
    def written_off(self) -> int:
        """Batches that were set aside and have not ended."""
        return len(self._written_off)

    def add(self, batch: Batch) -> None:
        self.batches += 1
        self.copies += batch.copies
        self._added_bytes += batch.size
        self._pending.append(batch)

    def reap(self, now: float) -> Iterator[EndedBatch]:
        """Take out the batches that have ended, oldest first, up to the first that has not."""
        while self._pending:
            batch = self._pending[0]
            state = self._query(batch)
            if state is TicketState.PENDING and now - batch.submitted_at <= self._timeout_s:
                return
            self._pending.popleft()
            self._removed_bytes += batch.size
            if state is TicketState.PENDING:
                self._written_off.append(batch)
                self._say(log.error, "written_off", batch, timeout_s=self._timeout_s)
            else:
                yield _ended(batch, state, now)

    def reap_late(self, now: float) -> Iterator[EndedBatch]:
        """Take out the written-off batches that have ended after all."""
        for batch in tuple(self._written_off):
            state = self._query(batch)
            if state is not TicketState.PENDING:
                self._written_off.remove(batch)
                self._say(log.warning, "ended_late", batch)
                # Its bytes left the bound when it was written off; where checksums are read, it must not enter it again.
                yield _ended(replace(batch, size=0), state, now)

    def _query(self, batch: Batch) -> TicketState:
        self.queries += 1
        try:
            state = batch.ticket.query()
        except Exception as error:  # whatever a copier raises, the job must end
            if isinstance(error, DeviceLost):
                self.lost = str(error)
            self._say(log.error, "failed", batch, reason=repr(error))
            return TicketState.FAILED
        if state is TicketState.FAILED:
            self._say(log.error, "failed", batch, reason="the copier reports a failure")
        return state

    def _say(self, say: Callable[..., object], what: str, batch: Batch, **more: object) -> None:
        jobs = [part.job.job.id for part in batch.parts]
        say(f"{self._work}_{what}", direction=self._direction.value, jobs=jobs, **more)


class Lanes:
    """The lanes of one rank: per direction one of copies and, where checksums are kept, one of their reading.

    Args:
        timeout_s: of every lane.
        reads: whether checksums are kept.
    """

    def __init__(self, timeout_s: float, *, reads: bool) -> None:
        self.loads = Lane(Direction.LOAD, timeout_s)
        self.stores = Lane(Direction.STORE, timeout_s)
        self.copies = (self.loads, self.stores)  # in the order in which they are served
        self._readings = {way: Lane(way, timeout_s, "checksum") for way in Direction} if reads else {}
        self.readings = (*self._readings.values(),)
        self.all = (*self.copies, *self.readings)

    @property
    def is_pending(self) -> bool:
        """Whether batches are pending; those written off do not count."""
        return any(self.all)

    @property
    def written_off(self) -> int:
        """Batches that were written off and have not ended."""
        return sum([lane.written_off for lane in self.all])

    @property
    def store_bytes(self) -> int:
        """Bytes of the pending stores."""
        reading = self._readings.get(Direction.STORE)
        return self.stores.pending_bytes + (reading.pending_bytes if reading is not None else 0)

    @property
    def lost(self) -> str | None:
        """Why the device runs nothing more of this process, None while it does."""
        return next((lane.lost for lane in self.copies if lane.lost), None)

    def reading_of(self, direction: Direction) -> Lane:
        """Return the lane of the checksums of a direction."""
        return self._readings[direction]


def _ended(batch: Batch, state: TicketState, now: float) -> EndedBatch:
    measured = batch.ticket.copy_seconds
    seconds = now - batch.submitted_at if measured is None else measured
    return EndedBatch(batch, state is TicketState.FAILED, seconds)
