"""The GPUs that NVIDIA's management library lists. Asking it takes neither a subprocess nor torch, which loads for seconds."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from functools import cache

_NAME_BYTES = 96
_SUCCESS = 0
_HOST_REGISTER_SUPPORTED = 99  # CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Args:
        name: the vendor's name of it.
        pci: its address on the bus, in the kernel's form; empty if unknown.
    """

    name: str
    pci: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that this process sees.

    Args:
        found: the GPUs.
        driver: the driver's version; empty if there is none.
        cuda: the newest CUDA that the driver supports, as 1000 times major plus 10 times minor; 0 if unknown.
        can_register: whether host memory can be registered with them.
    """

    found: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: int = 0
    can_register: bool = True


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy_id", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("id", ctypes.c_char * 32),
    )


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
    found = tuple(_device(nvml, number) for number in range(count.value))
    return Gpus(found, driver.value.decode(errors="replace"), cuda.value, can_register())


def can_register() -> bool:
    """Return whether host memory can be registered with the first GPU; also True if its driver does not answer."""
    device, answer = ctypes.c_int(), ctypes.c_int(1)
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) == _SUCCESS and cuda.cuDeviceGet(ctypes.byref(device), 0) == _SUCCESS:
            cuda.cuDeviceGetAttribute(ctypes.byref(answer), _HOST_REGISTER_SUPPORTED, device)
    return bool(answer.value)


def _device(nvml: ctypes.CDLL, number: int) -> Gpu:
    device, pci = ctypes.c_void_p(), _Pci()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
    nvml.nvmlDeviceGetName(device, name, _NAME_BYTES)
    nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(pci))
    return Gpu(name.value.decode(errors="replace"), _kernel_address(pci.id.decode(errors="replace")))


def _kernel_address(text: str) -> str:
    """Return the address in the kernel's form: four digits of the domain instead of eight, in lower case."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""
