"""Computes the cache slot for each token of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.block_table import BlockTable

PADDING = -1  # Slots below zero are not written.


def fill_slots(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
) -> None:
    """Write each token's slot into `slots`, and padding after the last token.

    Args:
        query_start_loc: where each request's tokens begin, and where the last request's tokens end.
        positions: each token's position in its request.
        block_table: one row of block ids per request.
        slots: filled in place.
        block_size: the number of tokens for each entry of the block table.
    """
    lengths = query_start_loc.diff().long()
    tokens = int(lengths.sum())
    rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    places = positions[:tokens].long()
    blocks = block_table[rows, places // block_size].long()
    slots[:tokens] = blocks * block_size + places % block_size
    slots[tokens:] = PADDING


def replace_kernel() -> None:
    """Replace the Triton kernel of vLLM's block table by `fill_slots`.

    Without Triton, vLLM calls a replacement of the kernel, and 0.32 passes the arguments to this replacement
    in a wrong order. A plain method works with every version.
    """
    from vllm.v1.worker.block_table import BlockTable

    BlockTable.compute_slot_mapping = _compute_slot_mapping


def _compute_slot_mapping(
    self: BlockTable, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    mode = getattr(self, "slot_mapping_mode", None)
    if mode is not None and mode.name == "NONE":  # A recurrent group has states instead of slots.
        return
    starts = query_start_loc[: num_reqs + 1]
    fill_slots(starts, positions, self.block_table.gpu, self.slot_mapping.gpu, self.block_size)
