"""Interfaces of the objects that are passed to the transfer side: clock, copier, and reader of the machine's files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.model.wire import Direction
    from kvoffload.transfer.runs import CopyRuns

HELD_COPIES = 256
"""A copier keeps the GIL while it enqueues a batch of up to this many copies, unless many are pending on the stream."""

Fence: TypeAlias = object
"""Recorded by a copier on the hook's thread; copies wait for it. Opaque to all other code."""

ReadText: TypeAlias = Callable[[str], str | None]
"""Returns a file's text, or None if it cannot be read."""


class Clock(Protocol):
    """Time in seconds; tests pass their own clock."""

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary start; never decreases. Callable from any thread."""
        ...

    def sleep(self, seconds: float, /) -> Awaitable[None]:
        """Wait for `seconds`."""
        ...


@dataclass(frozen=True, slots=True)
class Clocks:
    """The machine's clocks, and the sleep of coroutines, unless a test passes its own.

    Args:
        monotonic: returns seconds, for time limits and durations.
        unix: returns seconds since 1970, for output that people read.
        sleep: waits for a number of seconds.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class TicketState(Enum):
    """The state of a submitted batch."""

    PENDING = "pending"  # it may still touch memory on both sides
    READING = "reading"  # its copies have ended; the checksums of its host slots are being computed
    DONE = "done"  # every byte has arrived; the batch touches no memory any more
    FAILED = "failed"  # the batch touches no memory any more; the destination's bytes are undefined


class Ticket(Protocol):
    """One submitted batch."""

    def query(self) -> TicketState:
        """Return the batch's state, without blocking. Not called again once the batch has ended.

        A batch whose query raises counts as failed, so a copier may raise only once the batch has stopped running.
        `DeviceLost` means that all batches of the copier have stopped running.
        """
        ...

    @property
    def copy_seconds(self) -> float | None:
        """Seconds that the copies of an ended batch took, without waiting; None if the copier does not know."""
        ...


class Copier(Protocol):
    """Moves bytes. Batches of one direction end in the order in which they were submitted.

    Two threads may call `submit` at once, but never for the same direction.

    Attributes:
        slices: how many parts of batches `Ticket.query` has started so far; 0 if `submit` always starts whole batches.
    """

    slices: int

    def fence(self) -> Fence:
        """Return a fence behind everything that the calling thread (the hook's) has enqueued so far."""
        ...

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> Ticket:
        """Start a batch behind all of `fences`, without waiting for it.

        Raises:
            Exception: nothing was started. If some copies were started, `submit` returns a ticket that fails once they
                have ended.
        """
        ...

    def close(self) -> None:
        """Release the copier's resources. Never waits for a copy."""
        ...
