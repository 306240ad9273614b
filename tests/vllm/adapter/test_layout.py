"""A block's regions have all bytes of this block and no byte of another block, or the cache is refused.

Each test creates a cache as vLLM does, fills every block with its number through the model's views, and reads the
blocks through the regions. vLLM 0.29 and newer place all tensors in one allocation; `test_translations.py` tests every
placement with vLLM's own code. Older versions have a tensor for each layer, or one slab.
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


View = tuple[int, int, int]
"""A layer's view: the bytes of each block's page, the bytes from one block to the next, and the first byte."""


def views_of(raw: torch.Tensor, views: dict[str, View]) -> dict[str, torch.Tensor]:
    first = raw.storage_offset()
    return {
        name: fill(raw.as_strided((BLOCKS, page_bytes), (stride, 1), first + offset))
        for name, (page_bytes, stride, offset) in views.items()
    }


ROW, WIDE = BLOCKS * 64, BLOCKS * 96  # bytes of all blocks
SLAB = {"a": 0, "b": 32, "c": 64}
DESCRIBED: dict[str, tuple[int, int, dict[str, View], list[Any]]] = {
    # the regions, all bytes, the views, and vLLM's description of its tensors
    "a layer uses another layer's cache": (
        1,
        ROW,
        {"l0": (64, 64, 0), "uses": (64, 64, 0)},
        [placed(ROW, ["l0"], ROW, 64)],
    ),
    "before 0.29, layers share a tensor": (
        1,
        ROW,
        {"full": (64, 64, 0), "window": (64, 64, 0)},
        [older(ROW, ["full", "window"])],
    ),
    "before 0.29, one slab has all layers": (
        1,
        WIDE,
        {name: (32, 96, offset) for name, offset in SLAB.items()},
        [older(WIDE, [name], offset, 96) for name, offset in SLAB.items()],
    ),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_regions_have_each_byte_once(case: str) -> None:
    regions, size, views, tensors = DESCRIBED[case]
    raw = torch.zeros(size, dtype=torch.int8)
    layout = layout_of_caches(views_of(raw, views), config(*tensors))
    assert len(layout.regions) == regions
    check_pages(layout, size)


def test_the_kv_cache_may_begin_and_end_inside_its_storage() -> None:
    raw = torch.zeros(4096 + 3 * ROW + 32, dtype=torch.int8)[4096:]
    caches = {f"l{number}": fill(part) for number, part in enumerate(raw[: 3 * ROW].view(3, BLOCKS, 64))}
    layout = layout_of_caches(caches, config(placed(3 * ROW, [*caches], ROW, 64)))
    assert len(layout.regions) == 3
    check_pages(layout, 3 * ROW)


def test_a_view_of_a_wider_type_begins_where_its_layer_does() -> None:
    typed = torch.zeros(2, BLOCKS, 16, dtype=torch.float32)
    layout = layout_of_caches({"l1": typed[1]}, config(placed(2 * ROW, ["l0", "l1"], ROW, 64)))
    assert [region.address - typed.data_ptr() for region in layout.regions] == [0, ROW]


# -- one tensor per layer: before 0.29 ------------------------------------------------------------------------------


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
    """In the view, keys and values come before blocks, and tokens before heads; in memory it is reversed."""
    stored = torch.zeros(BLOCKS, 2, 2, 4, 8, dtype=torch.float32)
    view = stored.permute(1, 0, 3, 2, 4)
    layout = layout_of_caches({"l": view}, config(older(stored.numel() * 4, ["l"])))
    (region,) = layout.regions
    assert (region.address, region.page_bytes) == (stored.data_ptr(), 2 * 2 * 4 * 8 * 4)


def test_pages_may_be_padded_at_the_end() -> None:
    caches = views_of(torch.zeros(ROW, dtype=torch.int8), {"l": (48, 64, 0)})
    layout = layout_of_caches(caches, config(older(ROW, ["l"])))
    assert [region.page_bytes for region in layout.regions] == [64]


# -- what cannot be described ---------------------------------------------------------------------------------------

MISSING = "has 896 bytes, but 448 are described by its 1 regions"
REFUSED: dict[str, tuple[str, int, dict[str, View], list[Any]]] = {
    # the error, all bytes, the views, and vLLM's description of its tensors
    "bytes without a description": (MISSING, 2 * ROW, {"l": (64, 64, 0)}, [placed(2 * ROW, ["l"], ROW, 64)]),
    "bytes without a view": (MISSING, 2 * ROW, {"l": (64, 64, 0)}, [older(ROW, ["l"]), older(ROW, ["lost"])]),
    "regions that overlap in part": (
        "overlap",
        2 * ROW,
        {"a": (64, 64, 0), "b": (64, 64, 64)},
        [placed(2 * ROW, ["a"], ROW, 64), placed(2 * ROW, ["b"], ROW, 64, 64)],
    ),
    "pages of different sizes in the same bytes": (
        "share an address but not a shape",
        ROW,
        {"a": (64, 64, 0), "b": (32, 32, 0)},
        [placed(ROW, ["a"], ROW, 64), placed(ROW, ["b"], ROW // 2, 32)],
    ),
    "a size that is not a multiple of the blocks": (
        "no multiple",
        ROW + 10,
        {"a": (64, 64, 0)},
        [placed(ROW + 10, ["a"], ROW + 10, 64)],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_match_their_description_are_refused(case: str) -> None:
    error, size, views, tensors = REFUSED[case]
    caches = views_of(torch.zeros(size, dtype=torch.int8), views)
    with pytest.raises(EngineContractError, match=error):
        layout_of_caches(caches, config(*tensors))


@pytest.mark.parametrize(
    ("caches", "error"),
    [
        ({"l": torch.zeros(ROW).as_strided((BLOCKS, 16), (64, 2))}, "scattered"),
        ({"l": torch.zeros(5, 5, 5)}, "no dimension of l counts 7 blocks"),
        ({}, "registered no KV tensor"),
    ],
)
def test_views_that_are_no_pages_of_blocks_are_refused(caches: dict[str, torch.Tensor], error: str) -> None:
    with pytest.raises(EngineContractError, match=error):
        layout_of_caches(caches, config(older(ROW, ["l"])))
