"""A copier whose batches end when the test decides, successfully or not."""

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
    """One batch, which stays open until the test ends it.

    Args:
        direction: the direction of the batch.
        runs: the copies in the batch.
        fences: the fences that the batch was submitted behind.
    """

    def __init__(self, direction: Direction, runs: CopyRuns, fences: tuple[Fence, ...]) -> None:
        self.direction = direction
        self.runs = runs
        self.fences = fences
        self.queries = 0
        self.query_error: Exception | None = None
        """The error that every query raises; None for no error."""
        self.copy_seconds: float | None = None
        """Seconds that the copies took, as the copier reports them; set this before the ticket ends."""
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
        """Copy all bytes and succeed."""
        copy_by_memmove(self.runs)
        self._state = TicketState.DONE

    def fail(self) -> None:
        """Copy nothing and fail."""
        self._state = TicketState.FAILED

    def tear(self) -> None:
        """Copy the first half of each contiguous piece, then fail."""
        copy_by_memmove(CopyRuns(self.runs.source, self.runs.target, self.runs.size // 2))
        self._state = TicketState.FAILED

    def corrupt(self) -> None:
        """Copy all bytes, invert the bits of the first one, and report success."""
        copy_by_memmove(self.runs)
        first = ctypes.c_ubyte.from_address(int(self.runs.target[0]))
        first.value ^= 0xFF
        self._state = TicketState.DONE


class GatedCopier:
    """Copies between addresses in host memory; a batch is copied when the test finishes its ticket.

    Args:
        held: whether batches stay open; if False, each batch is finished when it is submitted, until `hold` is called.
    """

    def __init__(self, *, held: bool = True) -> None:
        self.slices = 0
        """Increase this to simulate a query that has started a part of a batch."""
        self.tickets: list[GatedTicket] = []
        """All batches, in order of submission."""
        self.fences = 0
        """Number of fences recorded so far. The n-th fence is the number n, starting with 1."""
        self.is_closed = False
        self._held = held
        self._submit_errors: deque[Exception] = deque()
        self._fence_errors: deque[Exception] = deque()

    @property
    def open_tickets(self) -> list[GatedTicket]:
        """Batches that have not ended, in order of submission."""
        return [ticket for ticket in self.tickets if ticket.is_open]

    def release(self) -> None:
        """Finish every open batch, and from now on each new batch when it is submitted."""
        self._held = False
        for ticket in self.open_tickets:
            ticket.finish()

    def hold(self) -> None:
        """Keep new batches open until the test ends them."""
        self._held = True

    def refuse_submit(self, error: Exception) -> None:
        """Make the next submission raise `error` and start nothing."""
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
        self.tickets.append(ticket)
        if not self._held:
            ticket.finish()
        return ticket

    def close(self) -> None:
        self.is_closed = True
