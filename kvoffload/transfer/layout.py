"""The addresses of the engine's KV cache blocks in device memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from kvoffload.model.errors import ConfigError, EngineContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class DeviceRegion:
    """The location of one tensor: the page of block `b` is the `page_bytes` bytes at `address + b * block_stride`.

    Args:
        address: address of block 0's page.
        block_stride: bytes from one block's page to the next; at least `page_bytes`, more if pages are padded.
        page_bytes: bytes of one block in this tensor.
        blocks: number of blocks.
        device: torch's name of the device, such as "cpu" or "cuda:0".
        owner: the object that must stay alive for the address to be valid.

    Raises:
        EngineContractError: the numbers do not describe a tensor of separate pages.
    """

    address: int
    block_stride: int
    page_bytes: int
    blocks: int
    device: str = "cpu"
    owner: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.page_bytes < 1:
            raise EngineContractError(f"a KV tensor has no bytes to copy: {self}")
        if self.block_stride < self.page_bytes:
            raise EngineContractError(f"pages of neighbouring blocks overlap: {self}")


@dataclass(frozen=True)
class DeviceLayout:
    """All regions of one rank. A block's bytes are its pages in all regions, in this order.

    Args:
        regions: the regions; no address appears twice.
        meaning: describes properties of a page's bytes that are not part of the engine's identity, such as the
            attention backends and the order of a cache's dimensions. Processes share blocks only if their meanings are
            equal.

    Raises:
        EngineContractError: there is no region, or the regions differ in their number of blocks or in their device.
    """

    regions: tuple[DeviceRegion, ...]
    meaning: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.regions:
            raise EngineContractError("the engine registered no KV tensor, so there is nothing to offload")
        counts = {region.blocks for region in self.regions}
        if len(counts) > 1:
            raise EngineContractError(f"KV tensors differ in their number of blocks: {sorted(counts)}")
        devices = {region.device for region in self.regions}
        if len(devices) > 1:
            raise EngineContractError(f"KV tensors of one rank lie on several devices: {sorted(devices)}")

    @classmethod
    def of(cls, regions: Iterable[DeviceRegion]) -> DeviceLayout:
        """Return the layout of `regions`, keeping each address once because layers may share a tensor.

        Raises:
            EngineContractError: two regions share an address but not a shape, or the layout is not valid.
        """
        known: dict[int, DeviceRegion] = {}
        for region in regions:
            first = known.setdefault(region.address, region)
            if first != region:
                raise EngineContractError(
                    f"two KV tensors share an address but not a shape: {first} and {region}"
                )
        return cls(tuple(known.values()))

    @cached_property
    def page_bytes(self) -> tuple[int, ...]:
        """Return the bytes of one block in each region."""
        return tuple(region.page_bytes for region in self.regions)

    @cached_property
    def slot_bytes(self) -> int:
        """Return the bytes of one block on this rank, which is also the size of a host slot."""
        return sum(self.page_bytes)

    @cached_property
    def blocks(self) -> int:
        """Return the number of device blocks; their ids start at 0."""
        return self.regions[0].blocks

    @property
    def is_cuda(self) -> bool:
        """Return whether the tensors are on a CUDA device, which needs pinned host memory."""
        return self.device.partition(":")[0] == "cuda"

    @property
    def device(self) -> str:
        """Return the device's name, such as "cpu" or "cuda:0"."""
        return self.regions[0].device


def check_pieces(wanted: str, layout: DeviceLayout) -> None:
    """Check that the engine's layout satisfies the setting `layout`.

    Args:
        wanted: the setting `layout`.
        layout: the layout of the tensors that the engine allocated.

    Raises:
        ConfigError: the setting requires each block in one piece, but the engine stores blocks in several.
    """
    pieces = len(layout.regions)
    if wanted == "blocks" and pieces > 1:
        problem = (
            f"layout is 'blocks', but the engine keeps a block of its KV cache in {pieces} pieces; set layout to 'engine', "
            "or choose an attention backend, and a version of the engine, that can keep all layers of a block together"
        )
        raise ConfigError([problem])


def digest_of(layout: DeviceLayout) -> bytes:
    """Return 16 bytes that are equal for layouts with the same page sizes in the same order and the same `meaning`."""
    pages = ",".join(map(str, layout.page_bytes))
    return xxh3_128(f"{pages} {layout.meaning}".encode()).digest()


def layout_of(tensors: Sequence[torch.Tensor]) -> DeviceLayout:
    """Return the layout of `tensors`, each shaped [blocks, ...], with any strides that keep a block's page contiguous.

    Raises:
        EngineContractError: a tensor is empty, its pages are scattered or overlap, or the layout is not valid.
    """
    return DeviceLayout.of(_region(tensor) for tensor in tensors)


def _region(tensor: torch.Tensor) -> DeviceRegion:
    if tensor.dim() < 1 or tensor.numel() == 0:
        raise EngineContractError(f"a KV tensor of shape {tuple(tensor.shape)} holds no block")
    if not _is_dense(tensor.shape[1:], tensor.stride()[1:]):
        raise EngineContractError(
            f"a block's page is not contiguous in a KV tensor of shape {tuple(tensor.shape)} "
            f"and strides {tensor.stride()}; give each contiguous part as a separate tensor"
        )
    item = tensor.element_size()
    page = tensor[0].numel() * item
    stride = tensor.stride(0) * item if tensor.shape[0] > 1 else page
    return DeviceRegion(tensor.data_ptr(), stride, page, tensor.shape[0], str(tensor.device), tensor)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements fill one piece of memory without gaps. The dimensions may be in any order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
