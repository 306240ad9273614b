"""Interfaces of what the transfer side is given: a clock, a copier, a reader of the machine's files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.model.wire import Direction
    from kvoffload.transfer.runs import CopyRuns

HELD_COPIES = 256
"""A copier keeps the interpreter's lock while it enqueues a batch of up to so many copies, unless much is pending."""

Fence: TypeAlias = object
"""Recorded by a copier on the hook's thread; a copy waits for it. Only the copier looks inside."""

ReadText: TypeAlias = Callable[[str], str | None]
"""Returns a file's text, None where it cannot be read."""


class Clock(Protocol):
    """Time; tests pass a clock of their own."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; never goes back. Callable from any thread."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


class SystemClock:
    """The machine's time, the clock of everything but tests."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TicketState(Enum):
    """Where a submitted batch stands."""

    PENDING = "pending"  # it may still touch memory on both sides
    READING = "reading"  # its copies have ended, the checksums of its host slots are being read
    DONE = "done"  # every byte has arrived; it touches nothing any more
    FAILED = "failed"  # it touches nothing any more; what the destination holds is undefined


class Ticket(Protocol):
    """One submitted batch."""

    def query(self) -> TicketState:
        """Return where the batch stands, without blocking. Not called again once it has ended.

        A batch whose query raises counts as failed, so a copier may raise only when nothing of the batch runs any more.
        `DeviceLost` says that of all its batches.
        """
        ...

    @property
    def copy_seconds(self) -> float | None:
        """Seconds that the copies of an ended batch took, waiting excluded; None where the copier does not know."""
        ...


class Copier(Protocol):
    """Moves bytes. Batches of one direction end in the order in which they were submitted.

    `submit` is called from two threads at once, but never by two for the same direction.

    Attributes:
        slices: parts of batches that queries have started so far; 0 where `submit` starts all of a batch.
    """

    slices: int

    def fence(self) -> Fence:
        """Record what copies must wait for: everything enqueued so far by the calling thread, which is the hook's."""
        ...

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> Ticket:
        """Start a batch behind all of `fences`, without waiting for it.

        Raises:
            Exception: nothing was started. If a part was, `submit` returns a ticket that fails once that part has ended.
        """
        ...

    def close(self) -> None:
        """Release the copier's resources. Never waits for a copy."""
        ...
