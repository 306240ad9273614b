from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.block_table import BlockTable

PADDING = -1  # Nothing is written to slots below zero.


def fill_slots(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
) -> None:
    """Write each token's slot to `slots`, and padding after the last token.

    Args:
        query_start_loc: for each request, the index of its first token; at the end, the number of tokens.
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
    """Make vLLM's block tables use `fill_slots` instead of a Triton kernel.

    Without Triton, vLLM calls its own replacement of the kernel, but version 0.32 passes the arguments in the
    wrong order. `fill_slots` works with every version.
    """
    from vllm.v1.worker.block_table import BlockTable

    BlockTable.compute_slot_mapping = _compute_slot_mapping


def _compute_slot_mapping(
    self: BlockTable, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    mode = getattr(self, "slot_mapping_mode", None)
    if mode is not None and mode.name == "NONE":  # a recurrent group has states instead of slots
        return
    starts = query_start_loc[: num_reqs + 1]
    fill_slots(starts, positions, self.block_table.gpu, self.slot_mapping.gpu, self.block_size)
