"""Copies between a CUDA device and pinned host memory, on two streams.

    hook's thread   ── kernels ──●── kernels ──▶        the engine's current stream; ● is the fence
                                 │ wait
    loads           ─────────────┴─[start]─ copies ─[end]─▶      the device's highest priority: a request waits for them
    stores          ───────────────[start]─ copies ─[end]─▶      its lowest: no request waits for a store

The fence is an event recorded by the hook's own thread on whatever stream is current there, and the only place that asks
which one that is. A store must read after the forward pass has written, a load must write after earlier kernels have
read or zeroed: both wait for it. A host slot needs no fence: it is loaded only after its store was seen to end.

The start event lies behind the waits, so what the two events measure is copying alone. Nothing here waits for the device.
Both events exist before anything is enqueued. If the end event cannot be recorded behind the copies, the batch stays pending, and each
query tries to record it again.

A load is submitted on the engine's thread, and enqueueing one copy takes the driver about half a microsecond. So only a
first slice of a large load is enqueued there; each query enqueues more of the rest, a few slices on the transfer
coroutine's thread, which queries at once, one on the engine's. Later batches may overtake the rest: the stream has
waited for the load's fences, its blocks are leased until the last slice has ended, and the end event lies behind that
one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffload.logs import get_logger
from kvoffload.model.errors import DeviceLost
from kvoffload.model.transfer import Direction
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.short_copies import ENGINE_ONLY, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.transfer.cuda_driver import Event, NvidiaDriver
    from kvoffload.transfer.ports import Fence
    from kvoffload.transfer.runs import CopyRuns
    from kvoffload.transfer.short_copies import Limits

log = get_logger("transfer")

_EVENTS_AHEAD = 64
_SLICES_BESIDE = 16  # that the coroutine's thread enqueues before it looks at other batches


@dataclass(slots=True)
class _Enqueued:
    """The outcome of enqueueing a batch's copies.

    Args:
        is_whole: none was refused.
        needed: what the copies need until they have ended.
        left: slices that were not enqueued yet.
    """

    is_whole: bool = True
    needed: object = None
    left: deque[CopyRuns] = field(default_factory=deque)


class CudaTicket:
    """One batch on a stream, between two events.

    Args:
        driver: whose.
        direction: of its copies.
        stream: which.
        start: recorded before the copies.
        end: to be recorded behind them.
        enqueued: the outcome of enqueueing.
    """

    def __init__(
        self,
        driver: NvidiaDriver,
        direction: Direction,
        stream: int,
        start: Event,
        end: Event,
        enqueued: _Enqueued,
    ) -> None:
        self._driver = driver
        self._direction = direction
        self._stream = stream
        self._events: tuple[Event, Event] | None = (start, end)
        self._enqueued = enqueued
        self._submitter = threading.get_ident()
        self._has_end = False
        self._is_refused = False
        self._seconds: float | None = None

    def query(self) -> TicketState:
        """Return where the batch stands, after enqueueing some of what is left of it.

        A query that the driver refuses is repeated later.

        Raises:
            DeviceLost: the device runs nothing more.
        """
        assert self._events is not None, "an ended batch is not asked again"
        if self._enqueued.left:
            self.enqueue(1 if threading.get_ident() == self._submitter else _SLICES_BESIDE)
            if self._enqueued.left:
                return TicketState.PENDING
        try:
            if not self._has_end:
                self.end()
            if not self._driver.has_passed(self._events[1]):
                return TicketState.PENDING
        except DeviceLost:
            raise
        except Exception as error:
            if not self._is_refused:  # once a batch
                log.warning("copy_query_refused", reason=repr(error))
            self._is_refused = True
            return TicketState.PENDING
        with contextlib.suppress(Exception):  # the bytes have arrived: a duration is not worth the job
            self._seconds = self._driver.seconds_between(*self._events)
        self._events = None
        self._enqueued.needed = None
        return TicketState.DONE if self._enqueued.is_whole else TicketState.FAILED

    def enqueue(self, slices: int) -> None:
        """Enqueue some of what is left. After a refusal nothing more is enqueued, but some of the copies may run."""
        left = self._enqueued.left
        while left and slices:
            slices -= 1
            runs = left.popleft()
            try:
                self._driver.copy(self._direction, runs, self._stream)
            except Exception as error:  # the end event must follow what was enqueued, whatever this is
                log.error(
                    "copy_refused", direction=self._direction.value, copies=len(runs), reason=repr(error)
                )
                self._enqueued.is_whole = False
                left.clear()

    def end(self) -> None:
        """Record the end event.

        Raises:
            Exception: it was not; the batch stays pending.
        """
        assert self._events is not None
        self._driver.record(self._events[1], self._stream)
        self._has_end = True

    @property
    def copy_seconds(self) -> float | None:
        return self._seconds


class CudaCopier:
    """Submits batches to the device: long copies to the copy engine, short ones to a kernel where that is faster.

    Args:
        driver: of the device.

    Attributes:
        kernel_below: for each direction the bytes of a run from which the copy engine copies it; 0 at first, and again
            should the kernel not be launched (`crossover.py`).
    """

    def __init__(self, driver: NvidiaDriver) -> None:
        self.driver = driver
        self.kernel_below: Limits = ENGINE_ONLY
        self._streams = {
            Direction.LOAD: driver.stream(urgent=True),
            Direction.STORE: driver.stream(urgent=False),
        }
        # Made here and kept by the driver, so that none is made while copies are being enqueued.
        _ = [driver.event(timed=timed) for timed in (True, False) for _ in range(_EVENTS_AHEAD)]

    def use_kernel(self, below: Limits) -> None:
        """Give copies of fewer bytes than `below` to the kernel.

        Raises:
            Exception: it cannot be prepared.
        """
        for direction, limit in below.items():
            if limit:
                self.driver.prepare_kernel(self._streams[direction])
        self.kernel_below = below

    def fence(self) -> Fence:
        event = self.driver.event(timed=False)
        self.driver.record_current(event)
        return event

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> CudaTicket:
        """Enqueue a batch behind `fences`, of a large load the first slice.

        Raises:
            Exception: CUDA refused before any copy was enqueued.
        """
        stream = self._streams[direction]
        start, end = self.driver.event(timed=True), self.driver.event(timed=True)
        for fence in fences:
            self.driver.wait(stream, fence)  # type: ignore[arg-type]  # opaque to others; made by `fence`
        self.driver.record(start, stream)
        enqueued = self._prepared(direction, runs, stream)
        ticket = CudaTicket(self.driver, direction, stream, start, end, enqueued)
        ticket.enqueue(1)
        if not enqueued.left:
            with contextlib.suppress(Exception):  # the ticket tries again when it is asked
                ticket.end()
        return ticket

    def close(self) -> None:
        """Release streams and events. What still runs on the streams ends by itself."""
        self.driver.close()

    def _prepared(self, direction: Direction, runs: CopyRuns, stream: int) -> _Enqueued:
        """Give short copies to the kernel, and leave the others, a load's in slices."""
        enqueued = _Enqueued()
        rest = self._copy_short(direction, runs, stream, enqueued)
        size = self.driver.slice_copies if direction is Direction.LOAD else max(len(rest), 1)
        enqueued.left.extend(rest.part(start, start + size) for start in range(0, len(rest), size))
        return enqueued

    def _copy_short(self, direction: Direction, runs: CopyRuns, stream: int, enqueued: _Enqueued) -> CopyRuns:
        """Give short copies to the kernel; return those that are left, all where it does not work."""
        below = self.kernel_below[direction]
        if not below:
            return runs
        short, rest = split(runs, below)
        if not len(short):
            return runs
        try:
            enqueued.needed = self.driver.copy_by_kernel(short, stream)
        except BufferError:  # too many are under way; the copy engine serves as well
            return runs
        except Exception as error:  # should it run after all, the same bytes are written twice
            self.kernel_below = ENGINE_ONLY
            log.warning("page_kernel_off", direction=direction.value, reason=repr(error))
            return runs
        return rest
