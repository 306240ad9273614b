"""Chooses copier, host memory and checksums by the device that the engine's tensors lie on and by the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.model.errors import EngineContractError
from kvoffload.transfer.host_memory import MmapAllocator, read_file
from kvoffload.transfer.numa import PreferredNode, node_of

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.checksums import Checksums
    from kvoffload.transfer.host_memory import HostAllocator, ReadText
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import Clock, Copier


def make_copier(layout: DeviceLayout, *, executor: Executor, clock: Clock) -> Copier:
    """Return the copier for the layout's device. Called on the engine's thread, with the device in use.

    Args:
        layout: what will be copied.
        executor: its threads do the copies where the device is the CPU; on CUDA they find out which copies a kernel does.
        clock: time.

    Raises:
        EngineContractError: there is no copier for this kind of device.
    """
    kind = _kind(layout)
    if kind == "cuda":
        from kvoffload.transfer.crossover import learn
        from kvoffload.transfer.cuda_copier import CudaCopier
        from kvoffload.transfer.cuda_driver import TorchCudaDriver

        copier = CudaCopier(TorchCudaDriver(layout.device))
        # Until it is done, everything goes through the copy engine.
        executor.submit(learn, copier, layout.device)
        return copier
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
        from kvoffload.transfer.cuda_driver import CudaPin, pci_address

        return MmapAllocator(executor, CudaPin(layout.device), node_for(pci_address(layout.device)))
    return MmapAllocator(executor)


def node_for(pci_address: str | None, read: ReadText = read_file) -> PreferredNode | None:
    """Return the NUMA node of a device, None where it is not known.

    Args:
        pci_address: of the device, None where that is not known either.
        read: reads the kernel's files.
    """
    node = None if pci_address is None else node_of(pci_address, read)
    return None if node is None else PreferredNode(node)


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
