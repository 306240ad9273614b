"""Memory to measure copies on, apart from the engine's.

Device memory comes from the driver's own stream-ordered pool and goes back to it: torch's pool would keep it, and might lend
memory that another stream has not finished with. Import this module only where a CUDA device is in use.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.model.errors import CopyError, HostMemoryError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvoffload.transfer.host_memory import Pin

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_kept: list[object] = []  # what a copy that did not end may still touch


@dataclass(frozen=True, slots=True)
class CudaScratch:
    """Addresses of what is lent; `cuda_copier.Scratch` says what they mean."""

    device: int
    host: NDArray[np.uint8]


@contextmanager
def lend_scratch(
    library: ctypes.CDLL, pin: Pin, size: int, stream: int, is_idle: Callable[[], bool]
) -> Iterator[CudaScratch]:
    """Lend memory; the calling thread has the device's context in use.

    Args:
        library: the driver's.
        pin: registers host memory with the device.
        size: bytes on the device, half of those on the host.
        stream: handle of the only stream that may use them.
        is_idle: waits for the stream; False where it does not come to rest.

    Raises:
        CopyError: the driver refuses, or a kernel would need another address than the host's own.
        HostMemoryError: the memory cannot be pinned.
    """
    with _outside_captures(library), _host(library, pin, 2 * size) as host:
        device = ctypes.c_uint64()
        _check(
            library.cuMemAllocAsync(ctypes.byref(device), ctypes.c_size_t(size), ctypes.c_void_p(stream)),
            "cuMemAllocAsync",
        )
        try:
            yield CudaScratch(device.value, host)
        finally:
            if not is_idle():
                _kept.append(host)
            library.cuMemFreeAsync(device, ctypes.c_void_p(stream))  # behind all that uses it


@contextmanager
def _host(library: ctypes.CDLL, pin: Pin, size: int) -> Iterator[NDArray[np.uint8]]:
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    address = memory.ctypes.data
    pin.register(address, size)
    try:
        seen = ctypes.c_uint64()
        code = library.cuMemHostGetDevicePointer_v2(ctypes.byref(seen), ctypes.c_void_p(address), 0)
        if code != 0 or seen.value != address:
            raise HostMemoryError("a kernel cannot use the host's addresses on this device")
        yield memory
    finally:
        if not any(kept is memory for kept in _kept):
            pin.unregister(address)


@contextmanager
def _outside_captures(library: ctypes.CDLL) -> Iterator[None]:
    """Keep what this thread does from spoiling a CUDA graph that another thread captures meanwhile."""
    mode = ctypes.c_int(_RELAXED)
    code = library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        if code == 0:
            library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # it holds the mode before


def _check(code: int, what: str) -> None:
    if code != 0:
        raise CopyError(f"the CUDA driver answered {what} with error {code}")
