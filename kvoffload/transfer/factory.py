"""Chooses copier, host memory and checksums by the device that the engine's tensors lie on and by the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.model.errors import EngineContractError
from kvoffload.transfer.host_memory import MmapAllocator

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.host_memory import HostAllocator
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock, Copier


def make_copier(layout: DeviceLayout, *, executor: Executor, clock: Clock) -> Copier:
    """Return the copier for the layout's device. Called on the engine's thread, with the device in use.

    Args:
        layout: what will be copied.
        executor: its threads do the copies where the device is the CPU; unused on CUDA.
        clock: time.

    Raises:
        EngineContractError: there is no copier for this kind of device.
    """
    kind = _kind(layout)
    if kind == "cuda":
        from kvoffload.transfer.cuda_copier import CudaCopier
        from kvoffload.transfer.cuda_driver import TorchCudaDriver

        return CudaCopier(TorchCudaDriver(layout.device))
    from kvoffload.transfer.host_copier import HostCopier

    return HostCopier(executor, clock)


def make_allocator(layout: DeviceLayout, *, executor: Executor) -> HostAllocator:
    """Return what makes the arena's memory: pinned where the device is a CUDA device.

    Args:
        layout: whose copies the memory is for.
        executor: its threads touch and pin.

    Raises:
        EngineContractError: there is no copier for this kind of device.
    """
    if _kind(layout) == "cuda":
        from kvoffload.transfer.cuda_driver import CudaPin

        return MmapAllocator(executor, CudaPin(layout.device))
    return MmapAllocator(executor)


def make_checksums(verify: str, arena: Arena, *, executor: Executor) -> Checksums | None:
    """Return what watches over the bytes of the arena's slots, None for "off".

    Args:
        verify: the setting.
        arena: whose slots.
        executor: its threads read them.
    """
    if verify == "off":
        return None
    from xxhash import xxh3_64

    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.slot_digests import SampledDigests, whole_digests

    digests = SampledDigests(arena, xxh3_64) if verify == "sample" else whole_digests(arena, xxh3_64)
    return Checksums(digests, arena.slots, executor)


def _kind(layout: DeviceLayout) -> str:
    kind = layout.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise EngineContractError(
            f"KV tensors lie on {layout.device!r}; offloading copies from cpu and cuda only"
        )
    return kind
