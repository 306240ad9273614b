"""NVIDIA's driver library by ctypes: prototypes, and errors with their names.

Functions that only ask or set are called with the interpreter's lock held (`PyDLL`): they take less than a microsecond, and
a thread that releases the lock may wait 5 ms to get it back while the engine computes. Functions that may take long release it
(`CDLL`). A function that enqueues is there in both ways, because it waits where its stream is full: its caller knows how much
is pending there (`driver.py`).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from kvoffload.model.errors import CopyError, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NOT_READY = 600
NOT_SUPPORTED = 801
BATCH_VERSION = 12080  # the interface of CUDA 12.8; asked for by number, newer drivers have it too

_pointer, _address, _size, _int, _uint = (
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint,
)
_QUICK: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (_pointer,),
    "cuCtxSetCurrent": (_pointer,),
    "cuThreadExchangeStreamCaptureMode": (_pointer,),
    "cuEventCreate": (_pointer, _uint),
    "cuEventDestroy_v2": (_pointer,),
    "cuEventElapsedTime": (_pointer, _pointer, _pointer),
}
_ENQUEUE: dict[str, tuple[Any, ...]] = {
    "cuEventRecord": (_pointer, _pointer),
    "cuStreamWaitEvent": (_pointer, _pointer, _uint),
    "cuMemcpyAsync": (_address, _address, _size, _pointer),
}
_LONG: dict[str, tuple[Any, ...]] = {
    "cuInit": (_uint,),
    "cuDriverGetVersion": (_pointer,),
    "cuDeviceGet": (_pointer, _int),
    "cuDeviceGetAttribute": (_pointer, _int, _int),
    "cuDeviceGetName": (_pointer, _int, _int),
    "cuDeviceGetPCIBusId": (_pointer, _int, _int),
    "cuDevicePrimaryCtxRetain": (_pointer, _int),
    "cuCtxGetStreamPriorityRange": (_pointer, _pointer),
    "cuStreamCreateWithPriority": (_pointer, _uint, _int),
    "cuStreamDestroy_v2": (_pointer,),
    "cuMemHostRegister_v2": (_pointer, _size, _uint),
    "cuMemHostUnregister": (_pointer,),
    "cuMemHostGetDevicePointer_v2": (_pointer, _pointer, _uint),
    "cuMemAllocAsync": (_pointer, _size, _pointer),
    "cuMemFreeAsync": (_address, _pointer),
    "cuEventSynchronize": (_pointer,),
    "cuModuleLoadData": (_pointer, _pointer),
    "cuModuleGetFunction": (_pointer, _pointer, ctypes.c_char_p),
    "cuLaunchKernel": (_pointer, *[_uint] * 7, _pointer, _pointer, _pointer),
    "cuStreamBeginCapture_v2": (_pointer, _int),
    "cuStreamEndCapture": (_pointer, _pointer),
}
_BATCH = (_pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer)

# After these the device runs nothing more of this process: deinitialized, an unavailable device, uncorrectable memory and
# link errors, what a kernel did wrong, a destroyed context, a terminated client of MPS, an unknown error. All other errors
# say nothing about copies that are under way.
_LOST = frozenset({4, 46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 999})
_UNANSWERABLE = frozenset({3, 201})  # not initialized, as in a forked child; a context that is gone
_CAPTURE = range(900, 909)


class CudaError(CopyError):
    """Raised when the driver refuses a call.

    Args:
        call: which.
        code: the driver's.
        name: of the code.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        self.code = code
        super().__init__(f"the CUDA driver answered {call} with {name} ({code})")

    @property
    def can_pass(self) -> bool:
        """Whether a graph capture somewhere in the process is why, so that the same call may succeed later."""
        return self.code in _CAPTURE

    @property
    def ends_queries(self) -> bool:
        """Whether no later query can succeed either."""
        return self.code in _UNANSWERABLE


class CudaLibrary:
    """The functions of `libcuda.so.1` as attributes; each raises `CudaError`, or `DeviceLost`, unless it succeeds.

    Those that enqueue release the interpreter's lock; `held` has them with the lock held.

    Raises:
        OSError: there is no such library.
    """

    def __init__(self) -> None:
        quick, long = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        self._error_name = long.cuGetErrorName
        for library, prototypes in ((quick, _QUICK), (long, _LONG | _ENQUEUE)):
            for name, types in prototypes.items():
                setattr(self, name, self._checked(library[name], name, types))
        self.held: Mapping[str, Callable[..., int]] = {
            name: self._checked(quick[name], name, types) for name, types in _ENQUEUE.items()
        }
        self.query_event: Callable[[int], int] = quick.cuEventQuery
        """Returns the code: `NOT_READY` is no error."""
        self.query_event.argtypes = [_pointer]
        self.copy_one = {True: _plain(quick, "cuMemcpyAsync"), False: _plain(long, "cuMemcpyAsync")}
        """By whether the lock is held, `cuMemcpyAsync` that returns the code: for a loop, in which a check takes as long as the call."""
        self._get_address = getattr(long, "cuGetProcAddress_v2", None)  # drivers before 12.0 lack it

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"{name} is not among the functions that were bound")

    def batch_copy(self) -> Mapping[bool, Callable[..., int]] | None:
        """Return the batched copy by whether the interpreter's lock is held; None for drivers before 12.8."""
        if self._get_address is None:
            return None
        found, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._get_address(
            b"cuMemcpyBatchAsync",
            ctypes.byref(found),
            ctypes.c_int(BATCH_VERSION),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if code != 0 or not found.value:
            return None
        held = ctypes.PYFUNCTYPE(ctypes.c_int, *_BATCH)(found.value)
        return {True: held, False: ctypes.CFUNCTYPE(ctypes.c_int, *_BATCH)(found.value)}

    def error(self, call: str, code: int) -> CudaError | DeviceLost:
        """Return the error to raise for a code."""
        found = ctypes.c_char_p()
        self._error_name(ctypes.c_int(code), ctypes.byref(found))
        name = found.value.decode() if found.value else "an unknown error"
        if code in _LOST:
            return DeviceLost(f"the CUDA driver answered {call} with {name} ({code})")
        return CudaError(call, code, name)

    def _checked(self, function: Any, name: str, types: tuple[Any, ...]) -> Any:  # noqa: ANN401  # ctypes has no types for these
        def check(code: int, *_: object) -> int:
            if code != 0:
                raise self.error(name, code)
            return code

        function.argtypes = types
        function.restype = ctypes.c_int
        function.errcheck = check
        return function


def _plain(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = library[name]  # an item is a new object each time, without the check
    function.argtypes = _ENQUEUE[name]
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found


@cache
def cuda_library() -> CudaLibrary:
    """Return the library, loaded once and initialized.

    Raises:
        OSError: there is no such library.
        CudaError: it does not start.
    """
    library = CudaLibrary()
    library.cuInit(0)
    return library
