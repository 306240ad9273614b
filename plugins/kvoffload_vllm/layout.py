"""Finds the memory addresses of vLLM's KV blocks from the tensors' addresses and strides.

Since 0.29, vLLM keeps all layers in one allocation. Layer `l`'s page of block `b` is at
`offset + l * layer_stride + b * block_stride`. The layout determines whether the next page in memory belongs to the
next block, or to the next layer of the same block:

    layer outermost    | A0 A1 A2 .. | B0 B1 B2 .. |       one region per layer, or per part of a layer, such as a head
    block outermost    | A0 B0 | A1 B1 | A2 B2 | ..        one region

Before 0.29, each tensor has its own allocation, or is part of a slab whose outermost dimension counts blocks. The
strides of a layer's view show whether another dimension is outside the blocks, for example if memory contains all keys
before all values.

Groups share memory: a block belongs to one group at a time, and a block with a given id has the same bytes in all
groups. So regions with the same address count once.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvoffload.model.errors import EngineContractError
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

    Caches = Mapping[str, torch.Tensor]


BLOCKS_OUTERMOST = "BLHNC"
"""vLLM's name for the layout in which all bytes of a block are adjacent."""


def preferred_layout(vllm_config: VllmConfig) -> str | None:
    """Return the layout to request from vLLM, or None to let vLLM choose.

    vLLM may ignore the request. vLLM calls this function before kvoffload has validated the settings.
    """
    settings = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    # vLLM 0.29 and newer have the module `kv_cache_layout`.
    offers_layouts = importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None
    return BLOCKS_OUTERMOST if offers_layouts and settings.get("layout") == "blocks" else None


def layout_of_caches(caches: Caches, kv_cache_config: KVCacheConfig) -> DeviceLayout:
    """Return the layout of the blocks in this rank's KV memory.

    Args:
        caches: each layer's view of the KV cache, by layer name.
        kv_cache_config: the worker's KV cache configuration.

    Raises:
        EngineContractError: the tensors cannot be divided into pages of blocks, or the pages overlap or do not fill the
            tensors.
    """
    blocks = kv_cache_config.num_blocks
    tensors = kv_cache_config.kv_cache_tensors
    regions: list[DeviceRegion] = []
    for tensor in tensors:
        find = _placed_regions if hasattr(tensor, "layers") else _older_regions
        regions += find(tensor, caches, blocks)
    layout = DeviceLayout.of(regions)
    _check_apart(layout)
    described, total = layout.slot_bytes * blocks, _total_bytes(tensors)
    if described != total:
        raise EngineContractError(
            f"vLLM's KV cache has {total} bytes, but {described} are described by its {len(layout.regions)} regions "
            f"of {blocks} blocks; layers: {', '.join(sorted(caches))}"
        )
    return layout


def meaning_of_caches(caches: Caches, kv_cache_config: KVCacheConfig, layers: Mapping[str, object]) -> str:
    """Return a string that identifies the meaning of a block's bytes, but does not depend on the number of blocks.

    The string has each layer's attention backend, and the dimensions and strides of the layer's cache. vLLM chooses
    both while a worker loads the model.

    Args:
        caches: each layer's view of the KV cache, by layer name.
        kv_cache_config: the worker's KV cache configuration.
        layers: vLLM's layers by name, which is vLLM's `static_forward_context`.
    """
    found = []
    for name, cache in sorted(caches.items()):
        layer: Any = layers.get(name)
        backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else ""
        found.append((name, backend, _form(cache, kv_cache_config.num_blocks)))
    return str(found)


def _form(view: torch.Tensor, blocks: int) -> list[tuple[int, int, int | None]]:
    """Return the index, size and stride of each dimension of a view, the outermost dimension first.

    The stride of a dimension outside a block is None, because it may depend on the number of blocks.
    """
    strides = view.stride()
    block_dim = next(iter(_dimensions_of_blocks(view, blocks)), 0)
    inside = [strides[d] if strides[d] < strides[block_dim] else None for d in range(view.dim())]
    sizes = [size // blocks if d == block_dim else size for d, size in enumerate(view.shape)]
    order = sorted(range(view.dim()), key=lambda d: -strides[d])
    return [(d, sizes[d], inside[d]) for d in order if view.shape[d] > 1]


def _placed_regions(tensor: KVCacheTensor, caches: Caches, blocks: int) -> Iterator[DeviceRegion]:
    known = next(((n, name) for n, name in enumerate(tensor.layers) if name in caches), None)
    if known is None:
        return
    number, view = known[0], caches[known[1]]
    # A view begins at its layer's block 0. The allocation itself may begin anywhere in the view's storage.
    start = view.data_ptr() - tensor.offset - number * tensor.layer_stride
    stride, span = tensor.block_stride, tensor.block_stride * blocks
    if tensor.layer_stride < span:
        yield _region(start, stride, stride, blocks, view)
        return
    parts, rest = divmod(tensor.layer_stride, span)
    if rest:
        raise EngineContractError(
            f"a layer's pages take {tensor.layer_stride} bytes, which is no multiple of the {span} that {blocks} "
            f"blocks of {stride} bytes take: {tensor.layers}"
        )
    for place in range(len(tensor.layers) * parts):
        yield _region(start + tensor.offset + place * span, stride, stride, blocks, view)


def _older_regions(tensor: KVCacheTensor, caches: Caches, blocks: int) -> Iterator[DeviceRegion]:
    name = next((name for name in tensor.shared_by if name in caches), None)
    if name is None:
        return
    view = caches[name]
    if slab_stride := getattr(tensor, "block_stride", 0):
        yield _region(view.data_ptr() - tensor.offset, slab_stride, slab_stride, blocks, view)
        return
    yield from _regions_by_strides(name, view, blocks)


def _regions_by_strides(name: str, view: torch.Tensor, blocks: int) -> Iterator[DeviceRegion]:
    """Yield a region for each index into the dimensions outside the blocks, such as one for keys and one for values."""
    block_dim = _block_dimension(name, view, blocks)
    # One of vLLM's blocks may consist of several blocks of the attention kernel.
    kernel_blocks = view.shape[block_dim] // blocks
    item, strides = view.element_size(), view.stride()
    others = [d for d in range(view.dim()) if d != block_dim and view.shape[d] > 1]
    outer = [d for d in others if strides[d] > strides[block_dim]]
    inside = [(strides[d], view.shape[d]) for d in others if d not in outer]
    if kernel_blocks > 1:
        inside.append((strides[block_dim], kernel_blocks))
    if not _is_dense(inside):
        raise EngineContractError(
            f"a block's bytes are scattered in {name}, of shape {tuple(view.shape)} and strides {strides}"
        )
    page = strides[block_dim] * kernel_blocks * item  # strides include the padding after a page
    for places in itertools.product(*(range(view.shape[d]) for d in outer)):
        offset = sum(place * strides[d] for place, d in zip(places, outer, strict=True))
        yield _region(view.data_ptr() + offset * item, page, page, blocks, view)


def _block_dimension(name: str, view: torch.Tensor, blocks: int) -> int:
    """Return the index of the dimension that counts blocks.

    Raises:
        EngineContractError: neither of the first two dimensions counts blocks.
    """
    fits = _dimensions_of_blocks(view, blocks)
    if not fits:
        raise EngineContractError(
            f"no dimension of {name} counts {blocks} blocks: its shape is {tuple(view.shape)}"
        )
    return fits[0]


def _dimensions_of_blocks(view: torch.Tensor, blocks: int) -> list[int]:
    """Return the indices of the dimensions that may count blocks, the most likely dimension first."""
    fits = [d for d in range(min(view.dim(), 2)) if view.shape[d] and view.shape[d] % blocks == 0]
    return fits[::-1] if view.shape[:1] == (2,) else fits


def _is_dense(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Return whether dimensions, given as (stride, size) pairs, cover one range of memory without gaps."""
    expected = 1
    for stride, size in sorted(dimensions):
        if stride != expected:
            return False
        expected *= size
    return True


def _check_apart(layout: DeviceLayout) -> None:
    """Raise an error if two regions overlap, because kvoffload would copy the common bytes twice."""
    ordered = sorted(layout.regions, key=lambda region: region.address)
    for region, following in itertools.pairwise(ordered):
        end = region.address + (region.blocks - 1) * region.block_stride + region.page_bytes
        if following.address < end:
            raise EngineContractError(f"two KV regions overlap: {region} and {following}")


def _total_bytes(tensors: Sequence[KVCacheTensor]) -> int:
    # If tensors share an allocation, `size` is the size of the whole allocation. Since 0.29, all tensors share one
    # allocation; before 0.29, the parts of a slab do.
    common = [tensor.size for tensor in tensors if _is_part(tensor)]
    alone = [tensor.size for tensor in tensors if not _is_part(tensor)]
    return int(max(common, default=0) + sum(alone))


def _is_part(tensor: KVCacheTensor) -> bool:
    return hasattr(tensor, "layers") or bool(getattr(tensor, "block_stride", 0))


def _region(address: int, stride: int, page: int, blocks: int, view: torch.Tensor) -> DeviceRegion:
    return DeviceRegion(address, stride, page, blocks, str(view.device), view)
