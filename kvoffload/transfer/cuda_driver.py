"""CUDA as the copier sees it: streams and events through torch, copies through the driver's own library.

Import this module only where a CUDA device is in use.

Copies take addresses, not tensors, and must cost the engine's thread little. NVIDIA's Python bindings want every address
wrapped in an object of its own (0.3 us each were measured, twice a copy, more than the driver itself takes), so the
bindings only look the entry point up, at a fixed version of its interface, and it is then called with numpy's arrays.
Without the bindings, or with a driver older than 12.8, every copy is a call of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kvoffload.logs import get_logger
from kvoffload.model.errors import CopyError, EngineContractError, HostMemoryError
from kvoffload.model.transfer import Direction
from kvoffload.transfer.cuda_scratch import lend_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffload.transfer.cuda_copier import Scratch
    from kvoffload.transfer.runs import CopyRuns

    Enqueue: TypeAlias = Callable[[Direction, CopyRuns, int], None]

log = get_logger("transfer")

_PATIENCE_S = 10.0  # with copies of a few megabytes
_BATCH_VERSION = 12080  # the interface of CUDA 12.8; asking for it by number gives it on newer drivers, too


class _MemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _MemcpyAttributes(ctypes.Structure):
    """How a batch reads its sources. Location hints stay empty: they concern managed memory only."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _MemLocation),
        ("target_hint", _MemLocation),
        ("flags", ctypes.c_uint),
    )


# When a source may be read. A store's source is written by kernels that the stream waits for, so it must be read in
# stream order. A load's source, a finished slot, does not change while it is pinned: the driver may read it at any time.
_IN_STREAM_ORDER, _ANY_TIME = 1, 3
_ACCESS_ORDER = {Direction.STORE: _IN_STREAM_ORDER, Direction.LOAD: _ANY_TIME}


class TorchCudaDriver:
    """One CUDA device, whose context the constructing thread must have in use.

    Args:
        device: torch's name of it, such as "cuda:0".
        batched: False makes every copy a call of its own, for comparison.

    Raises:
        EngineContractError: NVIDIA's driver library is not there (other vendors' devices are not supported yet).
    """

    def __init__(self, device: str, *, batched: bool = True) -> None:
        self._device = torch.device(device)
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise EngineContractError(f"no NVIDIA driver library for {device}: {error}") from error
        torch.cuda.init()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().query()  # creates the context where nothing has so far
            self._context = self._current_context()
        self._bound = threading.local()
        call = _batch_call() if batched else None
        self.is_batched = call is not None
        self._enqueue: Enqueue = _batched(call) if call is not None else _one_by_one(self._library)

    def stream(self, *, urgent: bool) -> torch.cuda.Stream:
        # To torch, 0 is the lowest priority and negative numbers are higher.
        return torch.cuda.Stream(self._device, priority=-1 if urgent else 0)

    def event(self, *, timed: bool) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)

    def record_current(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._device))

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def has_passed(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000  # torch counts milliseconds

    def copy(self, direction: Direction, runs: CopyRuns, stream: torch.cuda.Stream) -> None:
        self._bind_thread()
        self._enqueue(direction, runs, stream.cuda_stream)

    def copy_by_kernel(self, runs: CopyRuns, stream: torch.cuda.Stream) -> object:
        from kvoffload.transfer import page_kernel  # only where it is used: triton need not be installed

        return page_kernel.enqueue(runs, stream)

    @contextmanager
    def scratch(self, size: int, stream: torch.cuda.Stream) -> Iterator[Scratch]:
        self._bind_thread()
        pin = CudaPin(str(self._device))
        with lend_scratch(
            self._library, pin, size, stream.cuda_stream, lambda: _comes_to_rest(stream)
        ) as lent:
            yield lent

    def _current_context(self) -> int:
        context = ctypes.c_void_p()
        _check(self._library.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        if not context.value:
            raise EngineContractError(f"{self._device} has no CUDA context on the calling thread")
        return context.value

    def _bind_thread(self) -> None:
        """Give the calling thread the device's context: the driver's own calls need one, and a new thread has none."""
        if not hasattr(self._bound, "context"):
            _check(self._library.cuCtxSetCurrent(ctypes.c_void_p(self._context)), "cuCtxSetCurrent")
            self._bound.context = self._context


class CudaPin:
    """Registers host memory with one device's context, as it lies: no rounding, no second copy.

    Args:
        device: torch's name of it, such as "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def register(self, address: int, size: int) -> None:
        # A new thread's current device is 0: without the switch it would make a context there.
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code != 0:
            raise HostMemoryError(
                f"the CUDA driver refused to pin {size} bytes of host memory (error {code})"
            )

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code != 0:
            log.error("host_memory_not_unpinned", error=code)


def pci_address(device: str) -> str | None:
    """Return where a device sits, as in "0000:3b:00.0"; None where the driver does not say."""
    text = ctypes.create_string_buffer(32)
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libcuda.so.1")
        torch.cuda.init()
        index = torch.device(device).index or 0
        if library.cuDeviceGet(ctypes.byref(number), ctypes.c_int(index)) == 0:
            library.cuDeviceGetPCIBusId(text, ctypes.c_int(len(text)), number)
    return text.value.decode() or None


def _comes_to_rest(stream: torch.cuda.Stream) -> bool:
    """Wait for the stream; False where it does not end soon. An error of the device is no rest either."""
    deadline = time.monotonic() + _PATIENCE_S
    with contextlib.suppress(Exception):
        while not stream.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True
    return False


def _batch_call() -> Callable[..., int] | None:
    """Return the driver's batched copy, None where it cannot be had."""
    try:
        from cuda.bindings import driver

        error, *rest = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_VERSION, 0)
    except Exception as reason:  # not installed, or it does not find the library that is already loaded
        log.info("batched_copies_unavailable", reason=repr(reason))
        return None
    address = int(rest[0]) if int(error) == 0 and rest and rest[0] else 0
    if not address:
        log.info("batched_copies_unavailable", reason=f"the driver is older than CUDA 12.8 ({error})")
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    return prototype(address)


def _batched(call: Callable[..., int]) -> Enqueue:
    attributes = {direction: _MemcpyAttributes(order) for direction, order in _ACCESS_ORDER.items()}

    def enqueue(direction: Direction, runs: CopyRuns, stream: int) -> None:
        target, source, size = (np.ascontiguousarray(part) for part in (runs.target, runs.source, runs.size))
        first = ctypes.c_size_t(0)  # the one set of attributes holds from copy 0 on
        failed = ctypes.c_size_t(0)
        code = call(
            target.ctypes.data,
            source.ctypes.data,
            size.ctypes.data,
            len(size),
            ctypes.addressof(attributes[direction]),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        _check(code, f"cuMemcpyBatchAsync, copy {failed.value} of {len(size)}")

    return enqueue


def _one_by_one(library: ctypes.CDLL) -> Enqueue:
    call = library.cuMemcpyAsync
    call.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    call.restype = ctypes.c_uint

    def enqueue(direction: Direction, runs: CopyRuns, stream: int) -> None:
        for target, source, size in zip(
            runs.target.tolist(), runs.source.tolist(), runs.size.tolist(), strict=True
        ):
            _check(call(target, source, size, stream), "cuMemcpyAsync")

    return enqueue


def _check(code: int, what: str) -> None:
    if code != 0:
        raise CopyError(f"the CUDA driver answered {what} with error {code}")
