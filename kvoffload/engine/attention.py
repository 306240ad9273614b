"""Paged attention: new keys and values go to their blocks, and each request reads its own blocks back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from kvoffload.engine.batch_input import AttentionInput, Span


def write_kv(pages: torch.Tensor, group: AttentionInput, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store the new tokens' keys and values.

    Args:
        pages: [num_blocks, 2, block_tokens, kv_heads, head_dim], one layer's.
        group: the group that the layer belongs to.
        key: [tokens, kv_heads, head_dim].
        value: as `key`.
    """
    pages[group.write_blocks, 0, group.write_offsets] = key
    pages[group.write_blocks, 1, group.write_offsets] = value


def attend(pages: torch.Tensor, group: AttentionInput, query: torch.Tensor) -> torch.Tensor:
    """Attention of the new tokens, whose own keys and values have been written.

    Args:
        pages: as in `write_kv`.
        group: the group that the layer belongs to.
        query: [tokens, heads, head_dim].

    Returns:
        [tokens, heads, head_dim].
    """
    return torch.cat([_attend_span(pages, span, query[span.rows]) for span in group.spans])


def _attend_span(pages: torch.Tensor, span: Span, query: torch.Tensor) -> torch.Tensor:
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        _gather(pages, 0, span),
        _gather(pages, 1, span),
        attn_mask=span.mask,
        is_causal=span.is_causal,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _gather(pages: torch.Tensor, half: int, span: Span) -> torch.Tensor:
    """[1, kv_heads, keys, head_dim]: the keys (0) or values (1) of a span's tokens."""
    return pages[span.blocks, half].flatten(0, 1)[span.keys].transpose(0, 1)[None]
