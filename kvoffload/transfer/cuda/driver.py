"""The operations on one CUDA device that the copier needs, through NVIDIA's driver library.

torch only provides the handle of the engine's current stream. The driver uses its own:

* streams, because torch's streams come from a pool of 32 that other code uses too, and have one priority;
* events, because torch creates an event only when it is first recorded, and by then copies may be running;
* memory registration, because the CUDA runtime keeps a refusal as an error, which torch's next check would find.

Each method makes the device's context current on the calling thread, and puts every thread except the engine's into the
relaxed capture mode. Otherwise, calls that are unsafe during a graph capture would fail and break another thread's
capture.

A call that enqueues an operation blocks if the stream's command buffer is full, and our streams wait behind fences for
whole forward passes. So the driver counts the operations pending on each stream: once an event has completed, all
operations before it have ended. A call keeps the GIL only if this count guarantees room. Copiers call `has_room` before
they enqueue more.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.logs import get_logger
from kvoffload.model.errors import DeviceLost, EngineContractError, HostMemoryBusy, HostMemoryError
from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda.library import CAPTURE, NOT_READY, RELAXED, UNSUPPORTED, CudaError, cuda_library
from kvoffload.transfer.ports import HELD_COPIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvoffload.transfer.runs import CopyRuns

log = get_logger("transfer")

KERNEL_COPIES = 8192
"""The maximum number of copies in one launch of the page kernel."""

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
# Batches of many copies have been reported to crash or hang on devices of this major compute capability.
_BLACKWELL = 10
# The maximum number of copies in one batch call; this many fit into `_ROOM`. A call with 51,828 copies was reported to
# crash a driver.
_SLICE = 512
# The number of copies in a slice if each copy is enqueued by a separate call. A slice takes about a millisecond.
_CALLS = 256
# The maximum number of operations pending on a stream; about 1,000 launches are known to fit. A copy in a batch may
# take as much room as a launch, so it counts as one operation, although 8,192 batched copies fitted on an H200.
_ROOM = 768
# The maximum number of batched copies pending on a stream that waits for no event: enough to keep the device busy
# between two queries.
_RUNNING = 8192
_LAUNCH = 2  # a launch counts as two operations: the copy of the descriptors, and the kernel

_WITHOUT_PINNING = "; run the engine without confidential computing, or without kvoffload"

_pinned: list[NDArray[np.uint8]] = []  # memory that a device may access stays mapped until the process ends


# CUmemcpyAttributes, which say how a batch reads its sources. Only the first number is set: the location hints matter
# for managed memory only.
_Attributes = ctypes.c_uint * 6

# When the driver may read a source. A store's source is written by kernels that the stream waits for, so it must be
# read in stream order. A load's source, a finished slot, does not change while it is pinned: the driver may read it at
# any time.
_IN_STREAM_ORDER, _ANY_TIME = 1, 3
_ACCESS_ORDER = {Direction.STORE: _IN_STREAM_ORDER, Direction.LOAD: _ANY_TIME}


@dataclass(slots=True, eq=False)
class Event:
    """A CUDA event, whose handle returns to its pool when the last reference is dropped.

    CUDA allows a handle to be reused even while a stream waits for the event, because the wait refers to the earlier
    record of the event.

    Args:
        handle: the driver's handle.
        pool: the pool that the handle returns to.
        queue: the counts of the stream on which the event was recorded; None for an engine's stream.
        place: the number of operations enqueued on that stream when the event was recorded.
    """

    handle: int
    pool: deque[int]
    queue: _Queue | None = None
    place: int = 0

    def __del__(self) -> None:
        self.pool.append(self.handle)


@dataclass(slots=True)
class _Queue:
    """Counts the operations enqueued on one of our streams.

    If two threads count at the same time, an update may be lost. The pending count is correct again once a later event
    has completed.

    Args:
        enqueued: operations enqueued so far.
        ended: how many of these operations are known to have ended.
        waiting: the value of `enqueued` when the stream was last made to wait for an event.
    """

    enqueued: int = 0
    ended: int = 0
    waiting: int = 0

    @property
    def pending(self) -> int:
        return self.enqueued - self.ended


@dataclass(frozen=True, slots=True)
class CudaScratch:
    """Memory for measurements.

    Args:
        device: address of device memory, half the size of `host`.
        host: pinned host memory, registered like the arena's.
    """

    device: int
    host: NDArray[np.uint8]


class _Threads(threading.local):
    """Holds each thread's variable for the library's results. The first use relaxes the thread's capture mode.

    Only the engine's thread keeps its capture mode.
    """

    def __init__(self, relax: Callable[[], int], engine_thread: int) -> None:
        self.current = ctypes.c_void_p()
        if threading.get_ident() != engine_thread:
            relax()


class NvidiaDriver:
    """One CUDA device. Create it on the engine's thread; its methods may be called from any thread.

    Args:
        device: torch's name for the device, such as "cuda:0".
        current_stream: returns the handle of the calling thread's current stream on the device.
        batch_copies: when to use the driver's batched copy: "auto" if it is known to work on this device, "on" if the
            driver supports it (for measurements), "off" never.

    Attributes:
        is_batched: whether copies go to the driver in batches.
        slice_copies: how many copies to enqueue in one slice; this takes a millisecond at most.
        kernels: for each stream with a page kernel, the function that launches it; `CudaCopier.prepare_kernel` adds them.

    Raises:
        EngineContractError: NVIDIA's driver library cannot be loaded (other vendors' devices are not supported yet).
    """

    def __init__(
        self, device: str, current_stream: Callable[[], int] = lambda: 0, *, batch_copies: str = "auto"
    ) -> None:
        try:
            self.library = library = cuda_library()
        except OSError as error:
            raise EngineContractError(f"no NVIDIA driver library for {device}: {error}") from error
        self._current_stream = current_stream
        self._device = _answer(ctypes.c_int, library.cuDeviceGet, int(device.partition(":")[2] or 0))
        self._context = _answer(ctypes.c_void_p, library.cuDevicePrimaryCtxRetain, self._device)
        self._threads = _Threads(lambda: self._exchange_capture_mode(RELAXED), threading.get_ident())
        self.enter()
        self._spare: dict[bool, deque[int]] = {timed: deque() for timed in (True, False)}
        self._queues: dict[int, _Queue] = {}  # the counts of each stream, by the stream's handle
        self.kernels: dict[int, Callable[[CopyRuns], None]] = {}
        are_safe = batch_copies == "auto" and self.attribute(_CAPABILITY_MAJOR) < _BLACKWELL
        self._batch = library.batch_copy() if are_safe or batch_copies == "on" else None
        self.is_batched = self._batch is not None
        self.slice_copies = _SLICE if self.is_batched else _CALLS
        self._attributes = {way: _Attributes(order) for way, order in _ACCESS_ORDER.items()}

    @property
    def name(self) -> str:
        """Return the device's name, such as "NVIDIA H100 80GB HBM3"."""
        return self._text(self.library.cuDeviceGetName)

    @property
    def version(self) -> str:
        """Return the newest CUDA version that the driver supports, such as "13.0"."""
        number = _answer(ctypes.c_int, self.library.cuDriverGetVersion)
        return f"{number // 1000}.{number % 1000 // 10}"

    @property
    def pci_address(self) -> str:
        """Return the device's PCI address, such as "0000:3b:00.0"."""
        return self._text(self.library.cuDeviceGetPCIBusId)

    def attribute(self, number: int) -> int:
        """Return an attribute of the device, by its number in `cuda.h`."""
        return int(_answer(ctypes.c_int, self.library.cuDeviceGetAttribute, number, self._device))

    def stream(self, *, urgent: bool) -> int:
        """Create a stream of the highest or the lowest priority, and return its handle."""
        self.enter()
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        self.library.cuCtxGetStreamPriorityRange(ctypes.byref(lowest), ctypes.byref(highest))
        priority = highest if urgent else lowest
        create = self.library.cuStreamCreateWithPriority
        made: int = _answer(ctypes.c_void_p, create, _NON_BLOCKING, priority.value)
        self._queues[made] = _Queue()
        return made

    def event(self, *, timed: bool) -> Event:
        """Return an unused event."""
        pool = self._spare[timed]
        try:
            return Event(pool.popleft(), pool)
        except IndexError:
            self.enter()
            flags = 0 if timed else _NO_TIMING
            return Event(_answer(ctypes.c_void_p, self.library.cuEventCreate, flags), pool)

    def record_current(self, event: Event) -> None:
        """Record `event` on the calling thread's current stream of this device."""
        self.record(event, self._current_stream())

    def record(self, event: Event, stream: int) -> None:
        self.enter()
        self._enqueue("cuEventRecord", stream, event.handle, stream)
        queue = event.queue = self._queues.get(stream)
        event.place = queue.enqueued if queue is not None else 0

    def wait(self, stream: int, event: Event) -> None:
        """Make later work on `stream` wait for `event`. The calling thread does not wait."""
        self.enter()
        self._enqueue("cuStreamWaitEvent", stream, stream, event.handle, 0)
        if (queue := self._queues.get(stream)) is not None:
            queue.waiting = queue.enqueued

    def has_passed(self, event: Event) -> bool:
        """Return whether all work before `event` has ended.

        Raises:
            DeviceLost: this process can no longer use the device.
            CudaError: the driver refused the query, so the work may still run.
        """
        self.enter()
        code = self.library.query_event(event.handle)
        if code not in (0, NOT_READY):
            raise self.library.error("cuEventQuery", code)
        if code == 0 and event.queue is not None:
            event.queue.ended = max(event.queue.ended, event.place)
        return code == 0

    def seconds_between(self, start: Event, end: Event) -> float:
        """Return the seconds between two completed events that record the time."""
        self.enter()
        elapsed = self.library.cuEventElapsedTime
        return float(_answer(ctypes.c_float, elapsed, start.handle, end.handle)) / 1000

    def has_room(self, stream: int, copies: int, *, may_wait: bool) -> bool:
        """Return whether `copies` more copies can be enqueued without blocking.

        With `may_wait`, batched copies may block if their stream waits for no event. Single copies must never block:
        each blocking call would release the GIL, and might not get it back for 5 ms.
        """
        queue = self._queues[stream]
        is_running = may_wait and self._batch is not None and queue.ended >= queue.waiting
        return queue.pending + copies <= (_RUNNING if is_running else _ROOM)

    def copy(self, direction: Direction, runs: CopyRuns, stream: int) -> None:
        """Enqueue all copies on `stream`, to be made by the copy engine.

        Raises:
            CopyError: the driver refused; some of the copies may have been enqueued.
        """
        self.enter()
        if self._batch is not None:
            self._copy_in_batches(self._batch, direction, runs, stream)
            return
        copy = self.library.enqueue["cuMemcpyAsync"][self._keeps_lock(stream, len(runs))]
        columns = (column.tolist() for column in (runs.target, runs.source, runs.size))
        for numbers in zip(*columns, strict=True):
            if code := copy(*numbers, stream):
                raise self.library.error("cuMemcpyAsync", code)

    def copy_by_kernel(self, runs: CopyRuns, stream: int) -> None:
        """Enqueue at most `KERNEL_COPIES` copies as one launch of the stream's page kernel.

        Raises:
            BufferError: too many launches are in flight; nothing was enqueued.
            Exception: the kernel cannot be launched.
        """
        self.enter()
        self.kernels[stream](runs)
        self._queues[stream].enqueued += _LAUNCH

    @contextmanager
    def scratch(self, size: int, stream: int) -> Iterator[CudaScratch]:
        """Provide `size` bytes of device memory and twice as much host memory, for work on `stream` only.

        The device memory comes from the driver's own pool: torch's pool would keep it, and may return memory that
        another stream still uses. The host memory stays pinned.

        Raises:
            Exception: an allocation fails, or a kernel cannot access the host memory.
        """
        with self.relaxed():
            host = self.pinned(2 * size)
            device = self.allocate(size, stream)
            try:
                yield CudaScratch(device, host)
            finally:
                # The stream frees the memory after all work that uses it.
                self.library.cuMemFreeAsync(device, stream)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Relax the calling thread's capture mode, so that its calls do not break another thread's graph capture."""
        self.enter()
        before = self._exchange_capture_mode(RELAXED)
        try:
            yield
        finally:
            self._exchange_capture_mode(before)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Return zeroed, registered host memory, which a kernel accesses at the host's own addresses.

        The memory stays pinned until the process ends, because batches that timed out may still use it.

        Raises:
            HostMemoryError: this device sees host memory at other addresses.
            CudaError: the driver refuses.
        """
        memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.register(memory.ctypes.data, size)
        _pinned.append(memory)
        find = self.library.cuMemHostGetDevicePointer_v2
        if _answer(ctypes.c_uint64, find, memory.ctypes.data, 0) != memory.ctypes.data:
            raise HostMemoryError("a kernel cannot use the host's addresses on this device")
        return memory

    def allocate(self, size: int, stream: int) -> int:
        """Return the address of new device memory for work on `stream`."""
        self.enter()
        return int(_answer(ctypes.c_uint64, self.library.cuMemAllocAsync, size, stream))

    def register(self, address: int, size: int) -> None:
        """Pin host memory in place, without rounding its size up and without copying it.

        Raises:
            CudaError: the driver refuses.
        """
        self.enter()
        self.library.cuMemHostRegister_v2(address, size, 0)

    def unregister(self, address: int) -> None:
        self.enter()
        self.library.cuMemHostUnregister(address)

    def close(self) -> None:
        """Destroy streams and events. Work that still runs on a stream ends normally. The engine keeps the context."""
        with contextlib.suppress(CudaError, DeviceLost):
            self.enter()
            while self._queues:
                self.library.cuStreamDestroy_v2(self._queues.popitem()[0])
            for pool in self._spare.values():
                while pool:
                    self.library.cuEventDestroy_v2(pool.popleft())

    def _enqueue(self, name: str, stream: int, *arguments: int) -> None:
        """Call the library's function `name`, which enqueues one operation on `stream`."""
        if code := self.library.enqueue[name][self._keeps_lock(stream, 1)](*arguments):
            raise self.library.error(name, code)

    def _keeps_lock(self, stream: int, operations: int) -> bool:
        """Count `operations` as enqueued; return whether to keep the GIL during the call that enqueues them.

        Short calls keep the GIL; otherwise the time between a batch's two events could include a wait for the GIL.
        Calls that may block release the GIL. Calls on the engine's streams also release the GIL, because the driver
        does not count the operations pending on these streams.
        """
        queue = self._queues.get(stream)
        if queue is None:
            return False
        queue.enqueued += operations
        return operations <= HELD_COPIES and queue.pending <= _ROOM

    def _copy_in_batches(
        self, call: Mapping[bool, Callable[..., int]], direction: Direction, runs: CopyRuns, stream: int
    ) -> None:
        """Enqueue the copies in slices. One set of attributes applies to all copies of a slice."""
        columns = [np.ascontiguousarray(column) for column in (runs.target, runs.source, runs.size)]
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        rest = self._attributes[direction], ctypes.byref(first), 1, ctypes.byref(failed), stream
        for start in range(0, len(runs), _SLICE):
            count = min(_SLICE, len(runs) - start)
            addresses = (column.ctypes.data + 8 * start for column in columns)
            if code := call[self._keeps_lock(stream, count)](*addresses, count, *rest):
                one = f"copy {start + failed.value} of {len(runs)}"
                which = one if failed.value < count else "all copies"
                raise self.library.error(f"cuMemcpyBatchAsync, {which}", code)

    def _text(self, ask: Callable[..., int]) -> str:
        text = ctypes.create_string_buffer(128)
        ask(text, len(text), self._device)
        return text.value.decode()

    def enter(self) -> None:
        """Make the device's context current on the calling thread. The library's functions need a current context."""
        current = self._threads.current
        self.library.cuCtxGetCurrent(ctypes.byref(current))
        if current.value != self._context:
            self.library.cuCtxSetCurrent(self._context)

    def _exchange_capture_mode(self, mode: int) -> int:
        place = ctypes.c_int(mode)
        self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(place))
        return place.value


def _answer(kind: Callable[[], Any], call: Callable[..., int], *arguments: int) -> Any:  # noqa: ANN401  # by `kind`
    """Return the value that a library function writes through its first argument."""
    place = kind()
    call(ctypes.byref(place), *arguments)
    return place.value


class CudaPin:
    """Registers the arena's memory with one device.

    Args:
        driver: the device's driver.
    """

    def __init__(self, driver: NvidiaDriver) -> None:
        self._driver = driver

    def register(self, address: int, size: int) -> None:
        try:
            self._driver.register(address, size)
        except (CudaError, DeviceLost) as error:
            code = error.code if isinstance(error, CudaError) else None
            kind = HostMemoryBusy if code in CAPTURE else HostMemoryError
            advice = _WITHOUT_PINNING if code == UNSUPPORTED else ""
            raise kind(f"{size} bytes of host memory are not pinned: {error}{advice}") from error

    def unregister(self, address: int) -> bool:
        try:
            self._driver.unregister(address)
        except (CudaError, DeviceLost) as error:
            log.error("host_memory_not_unpinned", error=str(error))
            return False
        return True
