"""Everything that the checks read: the kernel's files, the GPUs, and the packages of this environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffload.transfer.ports import ReadText

_LARGEST_FILE = 1 << 20
_NAME_BYTES = 96
_SUCCESS = 0
_HOST_REGISTER_SUPPORTED = 99  # CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED


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
    """Return the GPUs that NVIDIA's management library lists; none if it is missing or does not answer.

    This takes neither a subprocess nor torch, which loads for seconds.
    """
    count, cuda = ctypes.c_uint(0), ctypes.c_int(0)
    driver = ctypes.create_string_buffer(_NAME_BYTES)
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return Gpus()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlSystemGetDriverVersion(driver, _NAME_BYTES)
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        names = tuple(_name(nvml, number) for number in range(count.value))
    except (OSError, AttributeError):  # no such library, another one, or one too old for these names
        return Gpus()
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


def reader(root: Path) -> ReadText:
    """Return a function that reads absolute paths below `root`, which is "/" except in tests."""

    def read(path: str) -> str | None:
        try:
            with (root / path.lstrip("/")).open(encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_FILE)
        except OSError:
            return None

    return read


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _entry_points(group: str) -> Mapping[str, str]:
    return {point.name: point.value for point in metadata.entry_points(group=group)}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that an engine will start on. Nothing is read before a check asks for it.

    Args:
        read: returns the text of a file by its absolute path, None if it cannot be read.
        lockable: the bytes of memory that this process may lock; negative without a limit.
        free: bytes that the file system of a folder has free.
        gpus: the visible GPUs and their driver.
        version: of a package in this environment, None if it is not installed.
        entry_points: values of a group by name.
        environ: the process's environment.
    """

    read: ReadText = field(default_factory=lambda: reader(Path("/")))
    lockable: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    gpus: Callable[[], Gpus] = find_gpus
    version: Callable[[str], str | None] = _version
    entry_points: Callable[[str], Mapping[str, str]] = _entry_points
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
