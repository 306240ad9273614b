"""Chooses the copier, the host memory and the checksums, depending on the tensors' device and the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.model.errors import EngineContractError
from kvoffload.transfer.host_memory import MmapAllocator, preferred_node

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    import numpy as np
    from numpy.typing import NDArray

    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.host_file import HostFile
    from kvoffload.transfer.host_memory import HostAllocator
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock, Copier, Threads


def make_copier(
    layout: DeviceLayout, *, threads: Threads, clock: Clock, batch_copies: str = "auto"
) -> Copier:
    """Return the copier for the layout's device. Call it on the engine's thread, after the KV cache was allocated.

    On a CUDA device, this function measures which copies the page kernel should make. Call it before the engine warms
    up, captures graphs and serves requests, because such work would distort the measurement, and the measurement would
    slow the work.

    Args:
        layout: the layout of the tensors to copy.
        threads: make the copies if the device is the CPU.
        clock: measures copies if the device is the CPU.
        batch_copies: the setting `batch_copies`.

    Raises:
        EngineContractError: there is no copier for this kind of device.
    """
    if _is_cuda(layout):
        from kvoffload.transfer.cuda.copier import CudaCopier, read_profile
        from kvoffload.transfer.cuda.crossover import learn
        from kvoffload.transfer.cuda.driver import NvidiaDriver

        driver = NvidiaDriver(layout.device, current_stream(layout.device), batch_copies=batch_copies)
        copier = CudaCopier(driver, read_profile(driver.name, driver.version))
        learn(copier, layout.device)
        return copier
    from kvoffload.transfer.host_copier import HostCopier

    return HostCopier(threads, clock)


def make_allocator(
    layout: DeviceLayout, *, executor: Executor, file: HostFile | None = None
) -> HostAllocator:
    """Return the allocator of the arena's memory, which also pins the memory if the device is a CUDA device.

    Args:
        layout: the layout of the tensors to copy.
        executor: its threads touch and pin the memory.
        file: the file that has the memory; None for anonymous memory.

    Raises:
        EngineContractError: there is no copier for this kind of device.
    """
    if _is_cuda(layout):
        from kvoffload.transfer.cuda.driver import CudaPin, NvidiaDriver

        driver = NvidiaDriver(layout.device)
        return MmapAllocator(executor, CudaPin(driver), preferred_node(driver.pci_address), file=file)
    return MmapAllocator(executor, file=file)


def current_stream(device: str) -> Callable[[], int]:
    """Return a function that asks torch for the handle of the calling thread's current stream on the device."""
    import torch

    place = torch.device(device)
    return lambda: int(torch.cuda.current_stream(place).cuda_stream)


def make_checksums(
    verify: str, arena: Arena, *, executor: Executor, known: NDArray[np.uint64] | None = None
) -> Checksums | None:
    """Return the checksums of the arena's slots, or None if `verify` is "off".

    Args:
        verify: the setting `verify`.
        arena: the rank's host memory.
        executor: its threads read the slots.
        known: the checksums of slots that an earlier process filled, kept up to date here; None without such slots.
    """
    if verify == "off":
        return None
    from kvoffload.transfer.checksums import Checksums, SampledSlots, whole_slots

    reader = SampledSlots(arena) if verify == "sample" else whole_slots(arena)
    return Checksums(reader, arena.slots, executor, known)


def _is_cuda(layout: DeviceLayout) -> bool:
    if not layout.is_cuda and layout.device.partition(":")[0] != "cpu":
        wrong = f"KV tensors lie on {layout.device!r}; offloading copies from cpu and cuda only"
        raise EngineContractError(wrong)
    return layout.is_cuda
