"""The GPUs that NVIDIA's management library lists. Asking it takes neither a subprocess nor torch, which loads for seconds."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvoffload.checks.check import Check, Finding, Setup, go, no_go, warn

if TYPE_CHECKING:
    from kvoffload.checks.machine import Machine

_NAME_BYTES = 96
_SUCCESS = 0
_HOST_REGISTER_SUPPORTED = 99  # CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
_BATCHED = 12080  # from this CUDA on, one call of the driver copies many blocks


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that this process sees.

    Args:
        names: the vendor's names of them.
        driver: the driver's version; empty if there is none.
        cuda: the newest CUDA that the driver supports, as 1000 times major plus 10 times minor; 0 if unknown.
        can_register: whether host memory can be registered with them.
    """

    names: tuple[str, ...] = ()
    driver: str = ""
    cuda: int = 0
    can_register: bool = True


@cache
def find_gpus(library: str = "libnvidia-ml.so.1") -> Gpus:
    """Return NVIDIA's GPUs; none if the library is missing or does not answer."""
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return Gpus()
        try:
            return _ask(nvml)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, another one, or one too old for these names
        return Gpus()


def _ask(nvml: ctypes.CDLL) -> Gpus:
    count, cuda = ctypes.c_uint(0), ctypes.c_int(0)
    driver = ctypes.create_string_buffer(_NAME_BYTES)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlSystemGetDriverVersion(driver, _NAME_BYTES)
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    names = tuple(_name(nvml, number) for number in range(count.value))
    return Gpus(names, driver.value.decode(errors="replace"), cuda.value, can_register())


def can_register() -> bool:
    """Return whether host memory can be registered with the first GPU; also True if its driver does not answer."""
    device, answer = ctypes.c_int(), ctypes.c_int(1)
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) == _SUCCESS and cuda.cuDeviceGet(ctypes.byref(device), 0) == _SUCCESS:
            cuda.cuDeviceGetAttribute(ctypes.byref(answer), _HOST_REGISTER_SUPPORTED, device)
    return bool(answer.value)


def _name(nvml: ctypes.CDLL, number: int) -> str:
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
    nvml.nvmlDeviceGetName(device, name, _NAME_BYTES)
    return name.value.decode(errors="replace")


def _gpu(_: Setup, machine: Machine) -> Finding:
    gpus = machine.gpus()
    if not gpus.names:
        return go("no NVIDIA GPU is visible here: copies are between two places in host memory")
    counted = ", ".join(f"{gpus.names.count(name)} {name}" for name in dict.fromkeys(gpus.names))
    newest = f"{gpus.cuda // 1000}.{gpus.cuda % 1000 // 10}" if gpus.cuda else "unknown"
    text = f"{counted}; driver {gpus.driver}, for CUDA {newest}"
    if not gpus.can_register:
        return no_go(
            f"{text}: its driver registers no host memory, as under confidential computing, so nothing could be cached",
            "run without confidential computing, or without kvoffload",
        )
    if gpus.cuda < _BATCHED:
        return warn(
            f"{text}: every block will need its own call of the driver", "a driver for CUDA 12.8 or newer"
        )
    return go(text)


CHECKS = (Check("gpu", _gpu),)
