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
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvoffload.logs import get_logger
from kvoffload.model.transfer import Direction
from kvoffload.transfer.ports import TicketState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.transfer.ports import Fence
    from kvoffload.transfer.runs import CopyRuns

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")

log = get_logger("transfer")


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
        """Enqueue all copies on `stream`.

        Raises:
            CopyError: the driver refused; some of them may have been enqueued.
        """
        ...


class CudaTicket(Generic[StreamT, EventT]):
    """One batch on a stream."""

    def __init__(
        self, copier: CudaCopier[StreamT, EventT], start: EventT, end: EventT, *, is_whole: bool
    ) -> None:
        self._copier = copier
        self._events = (start, end)
        self._is_whole = is_whole
        self._seconds: float | None = None

    def query(self) -> TicketState:
        """Return where the batch stands; its events go back to the pool when it has ended."""
        if not self._copier.driver.has_passed(self._events[1]):
            return TicketState.PENDING
        with contextlib.suppress(Exception):  # the bytes have arrived: a duration is not worth the job
            self._seconds = self._copier.driver.seconds_between(*self._events)
        self._copier.recycle(self._events)
        return TicketState.DONE if self._is_whole else TicketState.FAILED

    @property
    def copy_seconds(self) -> float | None:
        return self._seconds


class CudaCopier(Generic[StreamT, EventT]):
    """Submits batches to the device.

    Args:
        driver: CUDA, or a fake of it.
    """

    def __init__(self, driver: CudaDriver[StreamT, EventT]) -> None:
        self.driver = driver
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
        is_whole = self._copy(direction, runs, stream)
        self.driver.record(end, stream)
        return CudaTicket(self, start, end, is_whole=is_whole)

    def recycle(self, events: tuple[EventT, EventT]) -> None:
        """Take back the events of an ended batch."""
        self._pool.append(events)

    def close(self) -> None:
        """Drop the events. The streams go with the copier; what still runs on them ends by itself."""
        self._pool.clear()

    def _copy(self, direction: Direction, runs: CopyRuns, stream: StreamT) -> bool:
        """Enqueue the copies; False where the driver refused, in which case some of them may run."""
        try:
            self.driver.copy(direction, runs, stream)
        except Exception as error:  # the end event must follow what was enqueued, whatever this is
            log.error("copy_refused", direction=direction.value, copies=len(runs), reason=repr(error))
            return False
        return True

    def _take_events(self) -> tuple[EventT, EventT]:
        try:
            return self._pool.popleft()
        except IndexError:
            return self.driver.event(timed=True), self.driver.event(timed=True)
