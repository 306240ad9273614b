"""Copies between a KV cache and its host memory, in place of SGLang's CUDA kernels, for attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def define() -> None:
    """Add the copy functions to SGLang's modules, which import such functions only on a GPU."""
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla

    common._cuda_host_register = lambda *_, **__: None
    # SGLang's own backends read into pinned pages, which torch can allocate only where there is a GPU.
    base.HostKVCache.pin_memory = property(lambda _: False, lambda *_: None)
    for module in (mha, mla, mamba):
        module.transfer_kv_direct = copy_rows
        module.transfer_kv_per_layer_direct_pf_lf = copy_layer_from_pages
        module.transfer_kv_all_layer_direct_lf_pf = copy_layers_to_pages


def copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].view(-1, *target.shape[1:])


def copy_layer_from_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy from host pages, which contain all layers, to the rows of one layer."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def copy_layers_to_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the rows of all layers, first keys, then values, to host pages."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]
