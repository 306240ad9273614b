"""Lists GPUs by calling NVIDIA's driver directly, because importing torch takes seconds."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

_TEXT_BYTES = 96
_HOST_REGISTER_SUPPORTED = 99  # the driver's constant CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that this process can use.

    Args:
        names: the name of each GPU.
        cuda: the newest CUDA version that the driver supports, as 1000 * major + 10 * minor; 0 without a driver.
        can_register: whether the driver can register host memory.
        addresses: the PCI address of each GPU.
    """

    names: tuple[str, ...] = ()
    cuda: int = 0
    can_register: bool = True
    addresses: tuple[str, ...] = ()


@cache
def find_gpus() -> Gpus:
    """Return the GPUs; none if the driver is missing or cannot be initialized."""
    count = ctypes.c_int()
    cuda = ctypes.c_int()
    device = ctypes.c_int()
    answer = ctypes.c_int(1)
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    names = []
    addresses = []
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) != 0:
            return Gpus()
        driver.cuDriverGetVersion(ctypes.byref(cuda))
        driver.cuDeviceGetCount(ctypes.byref(count))
        for number in range(count.value):
            driver.cuDeviceGet(ctypes.byref(device), number)
            driver.cuDeviceGetName(text, _TEXT_BYTES, device)
            names.append(text.value.decode(errors="replace"))
            driver.cuDeviceGetPCIBusId(text, _TEXT_BYTES, device)
            addresses.append(text.value.decode(errors="replace"))
        driver.cuDeviceGetAttribute(ctypes.byref(answer), _HOST_REGISTER_SUPPORTED, device)
    except (OSError, AttributeError):  # the driver's library is missing, or lacks a function
        return Gpus()
    return Gpus(tuple(names), cuda.value, bool(answer.value), tuple(addresses))
