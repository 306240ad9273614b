"""Interfaces of the objects that are passed to the transfer side: clock, copier, threads, and reader of the machine's files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.model.wire import Direction
    from kvoffload.transfer.runs import CopyRuns

HELD_COPIES = 256
"""A copier keeps the GIL while it enqueues a batch of up to this many copies, unless many copies are pending."""

Fence: TypeAlias = object
"""A marker that a copier records on the hook's thread, and for which copies wait. Other code must not look inside."""

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
    """The machine's clocks, and the sleep of coroutines. Tests pass their own.

    Args:
        monotonic: returns seconds, for time limits and durations.
        unix: returns seconds since 1970, for output that people read.
        sleep: waits for a number of seconds.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Threads(Executor):
    """An executor that also makes calls without a future."""

    def start(self, work: Callable[[], None]) -> None:
        """Queue a call.

        Raises:
            RuntimeError: the executor was shut down, or has no thread and cannot start one.
        """
        self.submit(work)


class TicketState(Enum):
    """The state of a submitted batch."""

    PENDING = "pending"  # the batch may still use memory on both sides
    READING = "reading"  # the copies have ended; the checksums of the host slots are being computed
    DONE = "done"  # every byte has arrived; the batch no longer uses any memory
    FAILED = "failed"  # the batch no longer uses any memory; the destination's bytes are undefined


class Ticket(Protocol):
    """One submitted batch.

    Attributes:
        is_started: whether every copy has been started. Until then each query may start more.
    """

    @property
    def is_started(self) -> bool: ...

    def query(self) -> TicketState:
        """Return the batch's state, without blocking. Not called after the batch has ended.

        A batch whose query raises counts as failed, so a copier may raise only once the batch has stopped running.
        `DeviceLost` means that all batches of the copier have stopped running.
        """
        ...

    @property
    def copy_seconds(self) -> float | None:
        """Return the seconds that an ended batch's copies took, without waiting; None if they were not measured."""
        ...


class Copier(Protocol):
    """Moves bytes. Batches of one direction end in the order in which they were submitted.

    Two threads may call `submit` at once, but never for the same direction.

    Attributes:
        slices: how many parts of batches `Ticket.query` has started so far; 0 if `submit` always starts whole batches.
    """

    slices: int

    def fence(self) -> Fence:
        """Return a fence behind all work that the calling thread, the hook's thread, has enqueued so far."""
        ...

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> Ticket:
        """Start a batch behind all of `fences`, without waiting for the batch.

        Raises:
            Exception: nothing was started. If some copies were started, `submit` instead returns a ticket, which fails
                after they have ended.
        """
        ...

    def close(self) -> None:
        """Release the copier's resources. Never waits for a copy."""
        ...
