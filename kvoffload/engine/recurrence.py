"""A gated linear recurrence in place of attention: a state of one value a channel, whatever the length.

    state = gate * state + sqrt(1 - gate**2) * value          gate = sigmoid(key + _GATE_BIAS)
    out   = query * state

The tokens come one after the other, so that it changes nothing where a prompt is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvoffload.engine.batch_input import RecurrentInput, StateSpan

_GATE_BIAS = 3.0  # a token is remembered over some ten others


def recur(
    pages: torch.Tensor, group: RecurrentInput, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The new tokens' outputs; each request's state is read from its block, and left in the block of its last token.

    Args:
        pages: one layer's, [num_blocks, 2, block_tokens, kv_heads, head_dim]. A state lies where the first token's
            key would, and the rest of its page is unused.
        group: the group that the layer belongs to.
        query: [tokens, heads, head_dim].
        key: [tokens, kv_heads, head_dim].
        value: as `key`.

    Returns:
        [tokens, heads, head_dim].
    """
    gate = torch.sigmoid(key + _GATE_BIAS)
    gained = torch.sqrt(1 - gate * gate) * value
    states = torch.cat([_states(pages, span, gate[span.rows], gained[span.rows]) for span in group.spans])
    return query * states.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _states(pages: torch.Tensor, span: StateSpan, gate: torch.Tensor, gained: torch.Tensor) -> torch.Tensor:
    """The state after each of a span's rows; the last one goes to the span's block."""
    page = pages[:, 0, 0]
    state = torch.zeros_like(gained[0]) if span.read_block is None else page[span.read_block]
    found = torch.empty_like(gained)
    for row in range(len(gained)):
        state = torch.addcmul(gained[row], gate[row], state, out=found[row])
    page[span.write_block] = state
    return found
