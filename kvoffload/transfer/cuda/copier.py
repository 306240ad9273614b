"""Copies between a CUDA device and pinned host memory, on one stream per direction.

    hook's thread   ── kernels ──●── kernels ──▶        the engine's stream; ● is the fence
                                 │ wait
    loads           ─────────────┴─[start]─ copies ─[end]─▶      the device's highest priority: a request waits for them
    stores          ───────────────[start]─ copies ─[end]─▶      its lowest: no request waits for a store

Stream priorities affect the page kernel only. Copy engines ignore priorities.

The fence is an event that the hook's own thread records on its current stream. The copies of both directions wait for
the fence: a store must read after the forward pass has written, and a load must write after earlier kernels have read
or zeroed the block. A host slot needs no fence, because it is loaded only after its store has been reported.

The start event is recorded behind the waits, so that the two events time only the copies. No call waits for the device.
The start and end events are created before anything is enqueued. If recording the end event fails, the batch stays
pending, and each query retries.

A batch is enqueued in slices, only while its stream has room: a call on a full stream would block, and on the store
stream it could block for a whole forward pass. A load is submitted on the engine's thread, which enqueues one slice.
Each later query enqueues more: one slice on the engine's thread, or two on the coroutine's thread, which starts
querying immediately. Later batches may overtake the remaining slices. That is safe: the stream has already waited for
this batch's fences, its blocks stay leased until its last slice has ended, and its end event is recorded behind that
slice.

Slices for the page kernel come first. When all descriptor buffers are in use, these slices wait for a free one.

`kvoffload gpu-check` measures the best settings for the kernel, once for each card and driver, and writes them to a
file:

    ~/.cache/kvoffload/nvidia-h200-cuda-13-0.json     {"programs": 24, "fewest": 8, "stores": true}
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from kvoffload.logs import get_logger
from kvoffload.model.errors import DeviceLost
from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda.driver import KERNEL_COPIES
from kvoffload.transfer.ports import TicketState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.transfer.cuda.driver import NvidiaDriver
    from kvoffload.transfer.ports import Fence
    from kvoffload.transfer.runs import CopyRuns

log = get_logger("transfer")

Limits = Mapping[Direction, int]
"""For each direction, the copy size in bytes from which the copy engine is as fast as the kernel."""

ENGINE_ONLY: Limits = dict.fromkeys(Direction, 0)
"""Every copy goes through the copy engine."""

_ALIGNED = 16  # In bytes. At unaligned addresses the kernel is slower than `crossover.py` measures.
_EVENTS_AHEAD = 64
# How many slices the coroutine's thread enqueues before it checks other batches. On an H200, enqueuing a slice took
# up to 0.9 ms, during which the stream for the other direction may run empty.
_SLICES_BESIDE = 2
_MARKS_A_QUERY = 4  # the maximum number of events that one query checks
_LAUNCH = 4  # stream operations that one kernel slice takes


_Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class GpuProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the page kernel. The defaults were measured on an NVIDIA H200 (`tests/gpu/nvidia-h200.txt`).

    Args:
        programs: the number of thread blocks per launch. 24 thread blocks keep 96 KiB in flight; 32 thread blocks were
            2 % faster.
        fewest: the smallest number of short copies in a batch for which the kernel is launched.
        stores: whether stores use the kernel; its thread blocks take multiprocessors from the forward pass.
    """

    programs: _Count = 24
    fewest: _Count = 8
    stores: bool = True


_NOT_MEASURED = GpuProfile()


def profile_path(gpu: str, cuda: str) -> Path:
    """Return the path of a card's profile, under `XDG_CACHE_HOME` or else the user's `.cache`.

    Args:
        gpu: the card's name.
        cuda: the newest CUDA version that its driver supports.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = re.sub("[^a-z0-9]+", "-", f"{gpu} cuda {cuda}".lower())
    return Path(cache, "kvoffload", f"{name}.json")


def read_profile(gpu: str, cuda: str) -> GpuProfile:
    """Return a card's profile, or the default profile if the card has no file.

    A file that is not valid only causes a warning.
    """
    path = profile_path(gpu, cuda)
    try:
        return msgspec.json.decode(path.read_bytes(), type=GpuProfile)
    except (OSError, msgspec.MsgspecError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("gpu_profile_ignored", path=str(path), reason=str(error))
        return _NOT_MEASURED


class _Slice(NamedTuple):
    """Copies that are enqueued together.

    Args:
        runs: the copies.
        by_kernel: whether the page kernel makes the copies; otherwise the copy engine does.
    """

    runs: CopyRuns
    by_kernel: bool


class CudaTicket:
    """One batch of copies, enqueued between two events on the stream of its direction.

    Args:
        copier: the copier that submits this batch.
        direction: the direction of all its copies.
        left: the slices to enqueue; the first ones are enqueued immediately.
        fences: events that all copies wait for.

    Raises:
        Exception: CUDA refused before any copy was enqueued.
    """

    copy_seconds: float | None = None

    def __init__(
        self, copier: CudaCopier, direction: Direction, left: deque[_Slice], fences: Sequence[Fence]
    ) -> None:
        self._copier = copier
        self._driver = copier.driver
        self._direction = direction
        self._stream = copier.stream(direction)
        # Get both events before enqueueing anything, so that no copy is running if creating an event fails.
        self._events = self._driver.event(timed=True), self._driver.event(timed=True)
        self._left = left
        # Events recorded behind slices; these events show which slices the stream has finished.
        self._marks = deque(self._events[:1])
        self._is_whole = True  # True until a copy is refused
        # Loads are submitted on the engine's thread, which must not block.
        self._hook = threading.get_ident() if direction is Direction.LOAD else None
        self._has_end = False
        self._was_refused = False
        for fence in fences:
            self._driver.wait(self._stream, fence)  # type: ignore[arg-type]  # opaque elsewhere; made by `fence`
        self._driver.record(self._events[0], self._stream)
        self._enqueue()

    @property
    def is_started(self) -> bool:
        return self._has_end

    def query(self) -> TicketState:
        """Return the batch's state, after enqueueing some of its remaining slices.

        If the driver refuses a call, the batch stays pending, and the next query retries.

        Raises:
            DeviceLost: this process can no longer use the device.
        """
        try:
            if self._left:
                self._go_on()
            if self._left:
                return TicketState.PENDING
            if not self._has_end:
                self.end()
            if not self._driver.has_passed(self._events[1]):
                return TicketState.PENDING
        except DeviceLost:
            raise
        except Exception as error:
            if not self._was_refused:  # Log one refusal per batch.
                log.warning("copy_query_refused", reason=repr(error))
            self._was_refused = True
            return TicketState.PENDING
        with contextlib.suppress(Exception):  # Only the timing failed. The copy is complete.
            self.copy_seconds = self._driver.seconds_between(*self._events)
        return TicketState.DONE if self._is_whole else TicketState.FAILED

    def _enqueue(self) -> int:
        """Enqueue slices while there is room, and the end event behind the last slice. Return the number of slices.

        After a refusal nothing more is enqueued, but copies enqueued earlier may run.
        """
        enqueued, is_hook = 0, threading.get_ident() == self._hook
        slices = 1 if is_hook else _SLICES_BESIDE
        while self._left and enqueued < slices and self._enqueue_one(may_wait=not is_hook):
            enqueued += 1
            with contextlib.suppress(Exception):
                # Later queries retry a failed end event, and a later mark replaces a failed mark.
                if self._left:
                    self._mark()
                else:
                    self.end()
        return enqueued

    def _enqueue_one(self, *, may_wait: bool) -> bool:
        """Enqueue the first slice; return False if the slice has to wait."""
        # If a launch failed after this slice was cut, the copier no longer uses the kernel.
        if self._left[0].by_kernel and not self._copier.kernel_below[self._direction]:
            self._left.extendleft(reversed(self._copier.engine_slices(self._left.popleft().runs)))
        runs, by_kernel = self._left[0]
        if not self._driver.has_room(self._stream, _LAUNCH if by_kernel else len(runs), may_wait=may_wait):
            return False
        if by_kernel:
            return self._launch(runs, may_wait=may_wait)
        self._copy(runs)
        return True

    def _go_on(self) -> None:
        """Check the stream's progress, and enqueue more slices."""
        for _ in range(_MARKS_A_QUERY):
            if not self._marks or not self._driver.has_passed(self._marks[0]):
                break
            self._marks.popleft()
        self._copier.slices += self._enqueue()
        # Later batches may fill the stream, and their events are not queried before this batch has ended. So this batch
        # needs another mark to find out when there is room.
        if self._left and not self._marks:
            self._mark()

    def _mark(self) -> None:
        event = self._driver.event(timed=False)
        self._driver.record(event, self._stream)
        self._marks.append(event)

    def _launch(self, runs: CopyRuns, *, may_wait: bool) -> bool:
        try:
            self._driver.copy_by_kernel(runs, self._stream)
        except BufferError:  # too many launches are in flight
            return False
        except Exception as error:
            # If the launch ran in spite of the error, the copy engine writes the same bytes again.
            self._copier.use_kernel(ENGINE_ONLY)
            log.warning("page_kernel_off", direction=self._direction.value, reason=repr(error))
            return self._enqueue_one(may_wait=may_wait)
        self._left.popleft()
        return True

    def _copy(self, runs: CopyRuns) -> None:
        self._left.popleft()
        try:
            self._driver.copy(self._direction, runs, self._stream)
        except Exception as error:
            # Do not raise the error, because the end event must still follow earlier copies.
            log.error("copy_refused", direction=self._direction.value, copies=len(runs), reason=repr(error))
            self._is_whole = False
            self._left.clear()

    def end(self) -> None:
        """Record the end event.

        Raises:
            Exception: recording failed; the batch stays pending.
        """
        self._driver.record(self._events[1], self._stream)
        self._has_end = True


class CudaCopier:
    """Submits batches to the device: long copies go to the copy engine, short ones to a kernel if that is faster.

    Args:
        driver: the device's driver.
        profile: how to use the kernel on this device.

    Attributes:
        kernel_below: for each direction, the size in bytes below which the kernel copies a run (`crossover.py`); 0 at
            first, and after a launch has failed.
        slices: the number of slices that queries have enqueued so far.
    """

    def __init__(self, driver: NvidiaDriver, profile: GpuProfile = _NOT_MEASURED) -> None:
        self.driver = driver
        self.profile = profile
        self.kernel_below: Limits = ENGINE_ONLY
        self.slices = 0
        ways = (Direction.LOAD, Direction.STORE)
        self._streams = {way: driver.stream(urgent=way is Direction.LOAD) for way in ways}
        # The driver keeps these events, so that it need not create any while copies are being enqueued.
        _ = [driver.event(timed=timed) for timed in (True, False) for _ in range(_EVENTS_AHEAD)]

    def stream(self, direction: Direction) -> int:
        return self._streams[direction]

    def use_kernel(self, below: Limits) -> None:
        """Let the kernel copy runs of fewer bytes than `below`.

        Raises:
            Exception: the kernel cannot be prepared.
        """
        for direction, limit in below.items():
            if limit:
                self.prepare_kernel(direction)
        self.kernel_below = below

    def prepare_kernel(self, direction: Direction) -> None:
        """Compile the page kernel and allocate its memory for copies in one direction.

        Raises:
            Exception: the kernel is not available here.
        """
        # Import `PageKernel` here, because triton may not be installed.
        from kvoffload.transfer.cuda.page_kernel import PageKernel

        stream, kernels = self._streams[direction], self.driver.kernels
        if stream not in kernels:
            kernels[stream] = PageKernel(self.driver, stream, self.profile.programs).enqueue

    def fence(self) -> Fence:
        event = self.driver.event(timed=False)
        self.driver.record_current(event)
        return event

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> CudaTicket:
        """Enqueue the first slices of a batch behind `fences`; `CudaTicket.query` enqueues the rest.

        Raises:
            Exception: CUDA refused before any copy was enqueued.
        """
        below = self.kernel_below[direction]
        short, rest = split(runs, below, self.profile.fewest) if below else (runs[:0], runs)
        left = deque(_cut(short, KERNEL_COPIES, by_kernel=True) + self.engine_slices(rest))
        return CudaTicket(self, direction, left, fences)

    def close(self) -> None:
        """Release streams and events. Copies still running on the streams will end normally."""
        self.driver.close()

    def engine_slices(self, runs: CopyRuns) -> list[_Slice]:
        """Cut copies into slices for the copy engine."""
        return _cut(runs, self.driver.slice_copies, by_kernel=False)


def split(runs: CopyRuns, below: int, fewest: int) -> tuple[CopyRuns, CopyRuns]:
    """Split a batch into the runs for the kernel and the runs for the copy engine.

    Args:
        runs: the copies of one batch.
        below: the run size in bytes from which the copy engine is as fast as the kernel.
        fewest: the smallest number of short copies for which the kernel is launched.
    """
    is_short = (runs.size < below) & ((runs.target | runs.source) % _ALIGNED == 0)
    if int(is_short.sum()) < fewest:
        is_short[:] = False
    return runs[is_short], runs[~is_short]


def _cut(runs: CopyRuns, size: int, *, by_kernel: bool) -> list[_Slice]:
    return [_Slice(runs[start : start + size], by_kernel) for start in range(0, len(runs), size)]
