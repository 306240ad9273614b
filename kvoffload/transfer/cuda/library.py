"""NVIDIA's driver library through ctypes: prototypes, and errors with the driver's names.

Functions that only query or set state are called with the GIL held (`PyDLL`): they take less than a microsecond, and a
thread that releases the GIL may wait 5 ms to get it back while the engine computes. Slow functions release
the GIL (`CDLL`). Functions that enqueue are bound both ways, because they block if their stream is full. The caller
(`driver.py`) counts the pending operations and chooses between the two. The caller also checks the return code of these
functions, because a check here would take as long as the call.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from kvoffload.model.errors import CopyError, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NOT_READY = 600
UNSUPPORTED = 801
BATCH_VERSION = 12080  # the interface of CUDA 12.8; newer drivers also provide this interface

_QUICK: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
}
_ENQUEUE: dict[str, tuple[Any, ...]] = {
    "cuEventRecord": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}
_LONG: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetStreamPriorityRange": (c_void_p, c_void_p),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuMemAllocAsync": (c_void_p, c_size_t, c_void_p),
    "cuMemFreeAsync": (c_uint64, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
}
_BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)

# After these errors the device runs nothing more for this process: not initialized (as in a forked child),
# deinitialized, device unavailable, context gone, uncorrectable memory or link error, faulty kernel, context destroyed,
# MPS client terminated, unknown error. After other errors, copies may still be running.
_LOST = frozenset({3, 4, 46, 201, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 999})
CAPTURE = range(900, 909)
"""Error codes caused by a graph capture somewhere in the process. The same call may succeed later."""


class CudaError(CopyError):
    """Raised when the driver refuses a call.

    Args:
        text: the message, which names the call and the code.
        code: the driver's error code.
    """

    def __init__(self, text: str, code: int) -> None:
        self.code = code
        super().__init__(text)


class CudaLibrary:
    """The functions of `libcuda.so.1` as attributes; each raises `CudaError` or `DeviceLost` if it fails.

    Attributes:
        enqueue: functions that enqueue, by name and by whether they keep the GIL. These functions return the code and
            do not raise.
        query_event: returns the code and does not raise; `NOT_READY` is not an error.

    Raises:
        OSError: the library cannot be loaded.
    """

    def __init__(self) -> None:
        quick, long = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        self._error_name = long.cuGetErrorName
        # Drivers before 12.0 do not have cuGetProcAddress_v2.
        self._get_address = getattr(long, "cuGetProcAddress_v2", None)
        for library, prototypes in ((quick, _QUICK), (long, _LONG | _ENQUEUE)):
            for name, types in prototypes.items():
                function = _typed(library[name], types)
                function.errcheck = partial(self._check, name)
                setattr(self, name, function)
        self.enqueue: dict[str, Mapping[bool, Callable[..., int]]] = {
            name: {True: _typed(quick[name], types), False: _typed(long[name], types)}
            for name, types in _ENQUEUE.items()
        }
        self.query_event: Callable[[int], int] = _typed(quick["cuEventQuery"], (c_void_p,))

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"{name} is not among the functions that were bound")

    def batch_copy(self) -> Mapping[bool, Callable[..., int]] | None:
        """Return the batched copy function, by whether a call keeps the GIL; None for drivers before 12.8."""
        if self._get_address is None:
            return None
        found, status = c_void_p(), c_int()
        wanted = b"cuMemcpyBatchAsync", ctypes.byref(found), c_int(BATCH_VERSION), c_uint64(0)
        if self._get_address(*wanted, ctypes.byref(status)) != 0 or not found.value:
            return None
        held = ctypes.PYFUNCTYPE(c_int, *_BATCH)(found.value)
        return {True: held, False: ctypes.CFUNCTYPE(c_int, *_BATCH)(found.value)}

    def error(self, call: str, code: int) -> CudaError | DeviceLost:
        """Return the error to raise for the code that a call returned."""
        found = c_char_p()
        self._error_name(c_int(code), ctypes.byref(found))
        name = found.value.decode() if found.value else "an unknown error"
        text = f"the CUDA driver answered {call} with {name} ({code})"
        return DeviceLost(text) if code in _LOST else CudaError(text, code)

    def _check(self, name: str, code: int, *_: object) -> int:
        if code != 0:
            raise self.error(name, code)
        return code


def _typed(function: Any, types: tuple[Any, ...]) -> Any:  # noqa: ANN401  # ctypes has no types for these
    """Set the types of a function and return the function.

    Each look-up of a function returns a new object, so other uses are unaffected.
    """
    function.argtypes = types
    function.restype = c_int
    return function


@cache
def cuda_library() -> CudaLibrary:
    """Return the library, loaded once and initialized.

    Raises:
        OSError: the library cannot be loaded.
        CudaError: the library cannot be initialized.
    """
    library = CudaLibrary()
    library.cuInit(0)
    return library
