"""A copier whose batches stay open until the test decides whether they succeed or fail."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING

from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.model.wire import Direction
    from kvoffload.transfer.ports import Fence


class GatedTicket:
    """A batch of copies that stays open until the test ends it.

    Args:
        direction: the direction of the copies.
        runs: the source, target and size of each copy.
        fences: the fences for which the batch must wait.
    """

    def __init__(self, direction: Direction, runs: CopyRuns, fences: tuple[Fence, ...]) -> None:
        self.direction = direction
        self.runs = runs
        self.fences = fences
        self.queries = 0
        self.is_started = True
        """Whether every copy was started, so that queries start no more."""
        self.query_error: Exception | None = None
        """The error that each query of this batch raises; None if queries raise no error."""
        self.copy_seconds: float | None = None
        """How many seconds the copies took, as reported by the copier. Set this before the ticket ends."""
        self._state = TicketState.PENDING

    @property
    def is_open(self) -> bool:
        return self._state is TicketState.PENDING

    def query(self) -> TicketState:
        self.queries += 1
        if self.query_error is not None:
            raise self.query_error
        return self._state

    def finish(self) -> None:
        """Copy all bytes, and end the batch successfully."""
        copy_by_memmove(self.runs)
        self._state = TicketState.DONE

    def fail(self) -> None:
        """Copy nothing, and end the batch with a failure."""
        self._state = TicketState.FAILED

    def tear(self) -> None:
        """Copy only the first half of each contiguous piece, and end the batch with a failure."""
        copy_by_memmove(CopyRuns(self.runs.source, self.runs.target, self.runs.size // 2))
        self._state = TicketState.FAILED

    def corrupt(self) -> None:
        """Copy all bytes, invert the bits of the first byte, and end the batch successfully."""
        copy_by_memmove(self.runs)
        first = ctypes.c_ubyte.from_address(int(self.runs.target[0]))
        first.value ^= 0xFF
        self._state = TicketState.DONE


class GatedCopier:
    """A copier between addresses in host memory. It copies a batch when the test finishes the batch's ticket.

    Args:
        held: False to finish each batch as soon as it is submitted. `hold` and `release` change this later.
    """

    def __init__(self, *, held: bool = True) -> None:
        self.slices = 0
        """The number of parts of batches that queries have started. A test increases it to simulate such a query."""
        self.tickets: list[GatedTicket] = []
        """All batches, in the order in which they were submitted."""
        self.fences = 0
        """The number of fences recorded so far. The first fence is the number 1, the second is 2, and so on."""
        self.in_parts = False
        """Whether queries seem to have more copies to start, for batches that are submitted from now on."""
        self.is_closed = False
        self._held = held
        self._submit_errors: deque[Exception] = deque()
        self._fence_errors: deque[Exception] = deque()

    @property
    def open_tickets(self) -> list[GatedTicket]:
        """The batches that have not ended, in the order in which they were submitted."""
        return [ticket for ticket in self.tickets if ticket.is_open]

    def release(self) -> None:
        """Finish all open batches. From now on, finish each new batch as soon as it is submitted."""
        self._held = False
        for ticket in self.open_tickets:
            ticket.finish()

    def hold(self) -> None:
        """From now on, keep each new batch open until the test ends it."""
        self._held = True

    def refuse_submit(self, error: Exception) -> None:
        """Make the next call of `submit` raise `error` instead of starting copies."""
        self._submit_errors.append(error)

    def refuse_fence(self, error: Exception) -> None:
        """Make the next call of `fence` raise `error`."""
        self._fence_errors.append(error)

    def fence(self) -> Fence:
        if self._fence_errors:
            raise self._fence_errors.popleft()
        self.fences += 1
        return self.fences

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> GatedTicket:
        if self._submit_errors:
            raise self._submit_errors.popleft()
        ticket = GatedTicket(direction, runs, tuple(fences))
        ticket.is_started = not self.in_parts
        self.tickets.append(ticket)
        if not self._held:
            ticket.finish()
        return ticket

    def close(self) -> None:
        self.is_closed = True
