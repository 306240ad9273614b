"""Checks for each form of KV tensors that a block's regions contain all bytes of this block and none of
another block.

Each test creates a cache as vLLM does, fills every block with its number through the model's views, and
reads the blocks through the regions.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload.model.errors import EngineContractError
from kvoffload.transfer.layout import DeviceLayout
from kvoffload_vllm.layout import layout_of_caches

BLOCKS = 7


def page(layout: DeviceLayout, block: int) -> bytes:
    return b"".join(
        ctypes.string_at(region.address + block * region.block_stride, region.page_bytes)
        for region in layout.regions
    )


def check_pages(layout: DeviceLayout, total: int) -> None:
    assert layout.slot_bytes * BLOCKS == total
    for block in range(BLOCKS):
        assert page(layout, block) == bytes([block + 1]) * layout.slot_bytes


def config(*tensors: Any, blocks: int = BLOCKS) -> Any:
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=list(tensors))


def placed(size: int, layers: list[str], layer_stride: int, block_stride: int, offset: int = 0) -> Any:
    return SimpleNamespace(
        size=size, layers=layers, layer_stride=layer_stride, block_stride=block_stride, offset=offset
    )


def older(size: int, shared_by: list[str], offset: int = 0, block_stride: int = 0) -> Any:
    return SimpleNamespace(size=size, shared_by=shared_by, offset=offset, block_stride=block_stride)


def fill(view: torch.Tensor, block_dim: int = 0) -> torch.Tensor:
    """Fill each block with its number. Several entries along `block_dim` may belong to one block."""
    ratio = view.shape[block_dim] // BLOCKS
    for index in range(view.shape[block_dim]):
        view.select(block_dim, index).fill_(index // ratio + 1)
    return view


def bytes_view(
    raw: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    return fill(raw.as_strided(shape, strides, raw.storage_offset() + offset))


# -- placed: 0.29 and newer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_before", [0, 4096])
@pytest.mark.parametrize("ratio", [1, 2])
def test_if_layers_are_outermost_each_layer_is_a_region(padding_before: int, ratio: int) -> None:
    size = 3 * BLOCKS * 64
    raw = torch.zeros(padding_before + size + 32, dtype=torch.int8)[padding_before:]
    small = 64 // ratio
    caches = {
        f"l{layer}": bytes_view(raw, (BLOCKS * ratio, small), (small, 1), layer * BLOCKS * 64)
        for layer in range(3)
    }
    layout = layout_of_caches(caches, config(placed(size, ["l0", "l1", "l2"], BLOCKS * 64, 64)))
    assert len(layout.regions) == 3
    check_pages(layout, size)


def test_if_heads_are_outside_the_blocks_each_head_is_a_region() -> None:
    heads, page_bytes = 4, 16
    layer = heads * BLOCKS * page_bytes
    raw = torch.zeros(2 * layer, dtype=torch.int8)
    strides = (page_bytes, BLOCKS * page_bytes, 1)
    caches = {f"l{n}": bytes_view(raw, (BLOCKS, heads, page_bytes), strides, n * layer) for n in range(2)}
    layout = layout_of_caches(caches, config(placed(2 * layer, ["l0", "l1"], layer, page_bytes)))
    assert len(layout.regions) == 8
    check_pages(layout, 2 * layer)


def test_if_blocks_are_outermost_there_is_one_region() -> None:
    raw = torch.zeros(BLOCKS * 96, dtype=torch.int8)
    caches = {f"l{n}": bytes_view(raw, (BLOCKS, 32), (96, 1), n * 32) for n in range(3)}
    layout = layout_of_caches(caches, config(placed(BLOCKS * 96, ["l0", "l1", "l2"], 32, 96)))
    assert len(layout.regions) == 1
    check_pages(layout, BLOCKS * 96)


def test_a_blocks_pages_of_different_sizes_are_one_region() -> None:
    # Each block has 32 bytes of "a", 48 bytes of "b" and 16 bytes of padding. Layer "c" of a second group
    # uses the same bytes.
    raw = torch.zeros(BLOCKS * 96, dtype=torch.int8)
    caches = {
        "a": bytes_view(raw, (BLOCKS, 32), (96, 1), 0),
        "b": bytes_view(raw, (BLOCKS, 48), (96, 1), 32),
        "c": bytes_view(raw, (BLOCKS, 96), (96, 1), 0),
    }
    size = BLOCKS * 96
    tensors = placed(size, ["a"], 32, 96), placed(size, ["b"], 48, 96, 32), placed(size, ["c"], 96, 96)
    layout = layout_of_caches(caches, config(*tensors))
    assert len(layout.regions) == 1
    check_pages(layout, size)


def test_groups_that_share_memory_count_once() -> None:
    size = 2 * BLOCKS * 64
    raw = torch.zeros(size, dtype=torch.int8)
    caches = {
        name: bytes_view(raw, (BLOCKS, 64), (64, 1), place * BLOCKS * 64)
        for name, place in (("full0", 0), ("full1", 1), ("window0", 0), ("window1", 1), ("more", 0))
    }
    layers = ["full0", "full1"], ["window0", "window1"], ["more"]
    layout = layout_of_caches(caches, config(*(placed(size, one, BLOCKS * 64, 64) for one in layers)))
    assert len(layout.regions) == 2
    check_pages(layout, size)


def test_a_view_of_a_wider_type_begins_where_its_layer_does() -> None:
    raw = torch.zeros(2 * BLOCKS * 64, dtype=torch.int8)
    typed = raw.view(torch.float32).view(2, BLOCKS, 16)
    layout = layout_of_caches({"l1": typed[1]}, config(placed(raw.numel(), ["l0", "l1"], BLOCKS * 64, 64)))
    assert [region.address - raw.data_ptr() for region in layout.regions] == [0, BLOCKS * 64]


def test_a_layer_that_shares_another_layers_cache_is_ignored() -> None:
    raw = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    view = bytes_view(raw, (BLOCKS, 64), (64, 1), 0)
    layout = layout_of_caches(
        {"l0": view, "shares": view}, config(placed(raw.numel(), ["l0"], BLOCKS * 64, 64))
    )
    check_pages(layout, raw.numel())


# -- one tensor per layer, or one slab: before 0.29 -----------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("shape", "block_dim", "regions"),
    [
        ((2, BLOCKS, 4, 2, 8), 1, 2),  # the keys of all blocks come before the values
        ((BLOCKS, 2, 4, 2, 8), 0, 1),  # each block has its keys and values together
        ((BLOCKS, 4, 64), 0, 1),
        ((BLOCKS, 2, 4, 8), 0, 1),  # the layout on CPUs: a block's heads come before its tokens
    ],
)
def test_each_layer_with_its_own_tensor_has_its_own_regions(
    shape: tuple[int, ...], block_dim: int, regions: int, ratio: int
) -> None:
    shape = tuple(size * ratio if d == block_dim else size for d, size in enumerate(shape))
    views = {f"l{n}": fill(torch.zeros(shape, dtype=torch.int8), block_dim) for n in range(3)}
    size = views["l0"].numel()
    layout = layout_of_caches(views, config(*(older(size, [name]) for name in views)))
    assert len(layout.regions) == 3 * regions
    check_pages(layout, 3 * size)


def test_dimensions_may_have_another_order_in_memory() -> None:
    # The view has keys and values outside of the blocks, and tokens before heads. In memory both orders are
    # reversed.
    stored = torch.zeros(BLOCKS, 2, 2, 4, 8, dtype=torch.float32)
    view = stored.permute(1, 0, 3, 2, 4)
    layout = layout_of_caches({"l": view}, config(older(stored.numel() * 4, ["l"])))
    (region,) = layout.regions
    assert (region.address, region.page_bytes) == (stored.data_ptr(), 2 * 2 * 4 * 8 * 4)


def test_pages_may_be_padded_at_the_end() -> None:
    raw = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    view = bytes_view(raw, (BLOCKS, 48), (64, 1), 0)
    layout = layout_of_caches({"l": view}, config(older(raw.numel(), ["l"])))
    assert [region.page_bytes for region in layout.regions] == [64]


def test_layers_that_share_a_tensor_count_once() -> None:
    view = fill(torch.zeros(BLOCKS, 64, dtype=torch.int8))
    caches = {"full": view, "window": view.view(BLOCKS, 8, 8)}
    check_pages(layout_of_caches(caches, config(older(view.numel(), ["full", "window"]))), view.numel())


def test_a_slab_is_one_region() -> None:
    raw = torch.zeros(BLOCKS * 96, dtype=torch.int8)
    offsets = {"a": 0, "b": 32, "c": 64}
    caches = {name: bytes_view(raw, (BLOCKS, 32), (96, 1), offset) for name, offset in offsets.items()}
    tensors = [older(raw.numel(), [name], offset, 96) for name, offset in offsets.items()]
    layout = layout_of_caches(caches, config(*tensors))
    assert len(layout.regions) == 1
    check_pages(layout, raw.numel())


# -- what cannot be described ---------------------------------------------------------------------------------------


def test_bytes_without_a_description_or_a_view_are_noticed() -> None:
    raw = torch.zeros(2 * BLOCKS * 64, dtype=torch.int8)
    caches = {"l": bytes_view(raw, (BLOCKS, 64), (64, 1), 0)}
    for tensors in (
        [placed(raw.numel(), ["l"], BLOCKS * 64, 64)],
        [older(BLOCKS * 64, ["l"]), older(BLOCKS * 64, ["lost"])],
    ):
        with pytest.raises(
            EngineContractError, match="has 896 bytes, but 448 are described by its 1 regions"
        ):
            layout_of_caches(caches, config(*tensors))


def test_regions_that_overlap_in_part_are_refused() -> None:
    raw = torch.zeros(BLOCKS * 128, dtype=torch.int8)
    caches = {"a": bytes_view(raw, (BLOCKS, 64), (64, 1), 0), "b": bytes_view(raw, (BLOCKS, 64), (64, 1), 64)}
    size = BLOCKS * 128
    tensors = placed(size, ["a"], BLOCKS * 64, 64), placed(size, ["b"], BLOCKS * 64, 64, 64)
    with pytest.raises(EngineContractError, match="overlap"):
        layout_of_caches(caches, config(*tensors))


def test_groups_with_pages_of_different_sizes_in_the_same_bytes_are_refused() -> None:
    raw = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    caches = {"a": bytes_view(raw, (BLOCKS, 64), (64, 1), 0), "b": bytes_view(raw, (BLOCKS, 32), (32, 1), 0)}
    tensors = placed(raw.numel(), ["a"], BLOCKS * 64, 64), placed(raw.numel(), ["b"], BLOCKS * 32, 32)
    with pytest.raises(EngineContractError, match="share an address but not a shape"):
        layout_of_caches(caches, config(*tensors))


def test_a_layer_whose_size_is_not_a_multiple_of_its_blocks_is_refused() -> None:
    raw = torch.zeros(BLOCKS * 64 + 10, dtype=torch.int8)
    caches = {"a": bytes_view(raw, (BLOCKS, 64), (64, 1), 0)}
    with pytest.raises(EngineContractError, match="no multiple"):
        layout_of_caches(caches, config(placed(raw.numel(), ["a"], BLOCKS * 64 + 10, 64)))


def test_a_scattered_block_is_refused() -> None:
    raw = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    view = raw.as_strided((BLOCKS, 16), (64, 2))
    with pytest.raises(EngineContractError, match="scattered"):
        layout_of_caches({"l": view}, config(older(raw.numel(), ["l"])))


def test_a_view_that_counts_something_else_and_a_cache_without_tensors_are_refused() -> None:
    with pytest.raises(EngineContractError, match="no dimension of l counts 7 blocks"):
        layout_of_caches({"l": torch.zeros(5, 5, 5)}, config(older(500, ["l"])))
    with pytest.raises(EngineContractError, match="registered no KV tensor"):
        layout_of_caches({}, config())
