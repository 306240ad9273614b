"""Copies between a CUDA device and pinned host memory, on two streams of their own.

    hook's thread   ── kernels ──●── kernels ──▶        the engine's current stream; ● is the fence
                                 │ wait
    loads           ─────────────┴─[start]─ copies ─[end]─▶      highest priority: a request waits for them
    stores          ───────────────[start]─ copies ─[end]─▶      lowest priority: nobody waits, and decoding goes first

The fence is an event recorded by the hook's own thread on whatever stream is current there, and the only place that asks
which one that is. A store must read after the forward pass has written, a load must write after earlier kernels have
read or zeroed: both wait for it. A host slot needs no fence: it is loaded only after its store was seen to end.

The start event lies behind the waits, so what the two events measure is copying alone. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvoffload.logs import get_logger
from kvoffload.model.transfer import Direction
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.short_copies import ENGINE_ONLY, split

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from kvoffload.transfer.ports import Fence
    from kvoffload.transfer.runs import CopyRuns
    from kvoffload.transfer.short_copies import Limits

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")

log = get_logger("transfer")


class Scratch(Protocol):
    """Memory of our own to measure on."""

    @property
    def device(self) -> int:
        """Address of device memory, half as much as there is of the host's."""
        ...

    @property
    def host(self) -> NDArray[np.uint8]:
        """Pinned host memory, registered as the arena is."""
        ...


class CudaDriver(Protocol[StreamT, EventT]):
    """The few things that the copier asks of CUDA, on one device. Callable from any thread."""

    def stream(self, *, urgent: bool) -> StreamT:
        """Return a new stream, of the highest or the lowest priority."""
        ...

    def event(self, *, timed: bool) -> EventT:
        """Return a new event."""
        ...

    def record_current(self, event: EventT) -> None:
        """Record `event` on the calling thread's current stream of this device."""
        ...

    def record(self, event: EventT, stream: StreamT) -> None:
        """Record `event` on `stream`."""
        ...

    def wait(self, stream: StreamT, event: EventT) -> None:
        """Make later work of `stream` wait for `event`; the calling thread does not."""
        ...

    def has_passed(self, event: EventT) -> bool:
        """Whether all work before `event` is done.

        Raises:
            Exception: the device is in error; it runs nothing more of this process.
        """
        ...

    def seconds_between(self, start: EventT, end: EventT) -> float:
        """Return the seconds between two timed events that have passed."""
        ...

    def copy(self, direction: Direction, runs: CopyRuns, stream: StreamT) -> None:
        """Enqueue all copies on `stream`, for the copy engine.

        Raises:
            CopyError: the driver refused; some of them may have been enqueued.
        """
        ...

    def copy_by_kernel(self, runs: CopyRuns, stream: StreamT) -> object:
        """Enqueue all copies on `stream` as one kernel; return what must live until it has run.

        Raises:
            Exception: there is no such kernel here, or it cannot be launched.
        """
        ...

    def scratch(self, size: int, stream: StreamT) -> AbstractContextManager[Scratch]:
        """Lend `size` bytes of the device and twice as many of the host, for work of `stream` only.

        Raises:
            Exception: they cannot be had, or a kernel cannot reach the host's.
        """
        ...


@dataclass(slots=True)
class _Enqueued:
    """What became of a batch's copies.

    Args:
        is_whole: none was refused.
        needed: what the copies need until they have ended.
    """

    is_whole: bool = True
    needed: object = None


class CudaTicket(Generic[StreamT, EventT]):
    """One batch on a stream."""

    def __init__(
        self, copier: CudaCopier[StreamT, EventT], start: EventT, end: EventT, enqueued: _Enqueued
    ) -> None:
        self._copier = copier
        self._events = (start, end)
        self._enqueued = enqueued
        self._seconds: float | None = None

    def query(self) -> TicketState:
        """Return where the batch stands; its events go back to the pool when it has ended."""
        if not self._copier.driver.has_passed(self._events[1]):
            return TicketState.PENDING
        with contextlib.suppress(Exception):  # the bytes have arrived: a duration is not worth the job
            self._seconds = self._copier.driver.seconds_between(*self._events)
        self._copier.recycle(self._events)
        self._enqueued.needed = None
        return TicketState.DONE if self._enqueued.is_whole else TicketState.FAILED

    @property
    def copy_seconds(self) -> float | None:
        return self._seconds


class CudaCopier(Generic[StreamT, EventT]):
    """Submits batches to the device: long copies to the copy engine, short ones to a kernel where that is faster.

    Args:
        driver: CUDA, or a fake of it.

    Attributes:
        kernel_below: for each direction the bytes of a run from which the copy engine copies it; 0 at first, and again
            should the kernel not be launched (`crossover.py`).
    """

    def __init__(self, driver: CudaDriver[StreamT, EventT]) -> None:
        self.driver = driver
        self.kernel_below: Limits = ENGINE_ONLY
        self._streams = {
            Direction.LOAD: driver.stream(urgent=True),
            Direction.STORE: driver.stream(urgent=False),
        }
        self._pool: deque[tuple[EventT, EventT]] = deque()

    def fence(self) -> Fence:
        # Not pooled: several batches may wait for it, and the last of them to be submitted is not known here.
        event = self.driver.event(timed=False)
        self.driver.record_current(event)
        return event

    def submit(
        self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]
    ) -> CudaTicket[StreamT, EventT]:
        """Enqueue a batch behind `fences`.

        Raises:
            Exception: CUDA refused before anything was enqueued, or is in error for good.
        """
        stream = self._streams[direction]
        start, end = self._take_events()
        for fence in fences:
            self.driver.wait(stream, fence)  # type: ignore[arg-type]  # opaque to others; made by `fence`
        self.driver.record(start, stream)
        enqueued = self._copy(direction, runs, stream)
        self.driver.record(end, stream)
        return CudaTicket(self, start, end, enqueued)

    def recycle(self, events: tuple[EventT, EventT]) -> None:
        """Take back the events of an ended batch."""
        self._pool.append(events)

    def close(self) -> None:
        """Drop the events. The streams go with the copier; what still runs on them ends by itself."""
        self._pool.clear()

    def _copy(self, direction: Direction, runs: CopyRuns, stream: StreamT) -> _Enqueued:
        """Enqueue the copies. Where the driver refuses, some of them may run."""
        enqueued = _Enqueued()
        try:
            rest = self._copy_short(direction, runs, stream, enqueued)
            if len(rest):
                self.driver.copy(direction, rest, stream)
        except Exception as error:  # the end event must follow what was enqueued, whatever this is
            log.error("copy_refused", direction=direction.value, copies=len(runs), reason=repr(error))
            enqueued.is_whole = False
        return enqueued

    def _copy_short(
        self, direction: Direction, runs: CopyRuns, stream: StreamT, enqueued: _Enqueued
    ) -> CopyRuns:
        """Give short copies to the kernel; return those that are left, all where it does not work."""
        below = self.kernel_below[direction]
        if not below:
            return runs
        short, rest = split(runs, below)
        if not len(short):
            return runs
        try:
            enqueued.needed = self.driver.copy_by_kernel(short, stream)
        except (
            Exception
        ) as error:  # if it runs after all, the same bytes are written twice, one after the other
            self.kernel_below = ENGINE_ONLY
            log.warning("page_kernel_off", direction=direction.value, reason=repr(error))
            return runs
        return rest

    def _take_events(self) -> tuple[EventT, EventT]:
        try:
            return self._pool.popleft()
        except IndexError:
            return self.driver.event(timed=True), self.driver.event(timed=True)
