from __future__ import annotations

import ctypes

import pytest
import torch

from kvoffload.model.errors import EngineContractError
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion, layout_of


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 2, 3),
        torch.arange(60.0).reshape(5, 12)[:, :8],  # pages with padding
        torch.arange(60.0).reshape(5, 12)[1:],  # a storage offset
        torch.arange(60.0).reshape(5, 12)[::2],  # every other block
        torch.arange(120.0).reshape(5, 2, 3, 4).permute(0, 2, 1, 3),  # dimensions swapped within the page
        torch.arange(20.0).reshape(1, 5, 4).expand(1, 5, 4),
        torch.arange(24, dtype=torch.bfloat16).reshape(2, 1, 12),
    ],
)
def test_blocks_of_contiguous_pages_have_the_right_addresses(tensor: torch.Tensor) -> None:
    layout = layout_of([tensor])
    (region,) = layout.regions
    assert (layout.blocks, layout.slot_bytes, layout.device) == (len(tensor), tensor[0].nbytes, "cpu")
    assert region.owner is tensor
    for block in range(len(tensor)):
        page = ctypes.string_at(region.address + block * region.block_stride, region.page_bytes)
        assert sorted(page) == sorted(tensor[block].contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        # keys and values are separate, and blocks are in dimension 1
        (torch.zeros(2, 4, 8).transpose(0, 1), "not contiguous"),
        (torch.zeros(4, 8)[:, ::2], "not contiguous"),
        (torch.zeros(4, 8).expand(3, 4, 8), "overlap"),
        (torch.zeros(0, 8), "no block"),
        (torch.tensor(1.0), "no block"),
    ],
)
def test_tensors_that_cannot_be_copied_page_by_page_are_refused(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(EngineContractError, match=reason):
        layout_of([tensor])


def test_layers_that_share_a_tensor_are_copied_once() -> None:
    shared, own = torch.zeros(4, 8), torch.zeros(4, 2)
    layout = layout_of([shared, own, shared])
    assert len(layout.regions) == 2
    assert layout.slot_bytes == 40


def test_one_address_with_two_shapes_is_refused() -> None:
    tensor = torch.zeros(4, 8)
    with pytest.raises(EngineContractError, match="share an address"):
        layout_of([tensor, tensor.view(8, 4)])


def test_regions_must_have_one_device_and_one_number_of_blocks() -> None:
    with pytest.raises(EngineContractError, match=r"number of blocks: \[3, 4\]"):
        layout_of([torch.zeros(4, 8), torch.zeros(3, 8)])
    with pytest.raises(EngineContractError, match="several devices"):
        DeviceLayout((DeviceRegion(64, 8, 8, 2, "cuda:0"), DeviceRegion(128, 8, 8, 2, "cuda:1")))
    with pytest.raises(EngineContractError, match="nothing to offload"):
        layout_of([])
