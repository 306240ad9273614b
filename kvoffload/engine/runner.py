"""Runs the model over a step's batch, on one device, with the KV cache in blocks.

Attention is paged: new keys and values are written to their blocks, and each request reads its own blocks back. A
recurrent layer uses a gated linear recurrence instead. The state has one value per channel, regardless of the length:

    state = gate * state + sqrt(1 - gate**2) * value          gate = sigmoid(key + _GATE_BIAS)
    out   = query * state

A recurrent layer computes its tokens one after the other, so the result does not depend on how a prompt is split into
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvoffload.engine.batch_input import AttentionInput, BatchInput, InputMaker, Span, StateSpan
from kvoffload.engine.errors import ConfigError
from kvoffload.engine.model import Transformer
from kvoffload.engine.request import Token

if TYPE_CHECKING:
    from kvoffload.engine.config import EngineConfig
    from kvoffload.engine.plugin import GroupFacts
    from kvoffload.engine.scheduler import Batch

_GATE_BIAS = 3.0  # with this bias, a token affects a recurrent layer's state for about ten more tokens


class Runner:
    """Holds the weights and the physical KV tensors, and runs the model.

    There is one KV tensor per layer of a group, [num_blocks, 2, block_tokens, kv_heads, head_dim]. Each tensor serves
    one layer of each group; these layers use different blocks. With replicas, each tensor exists several times, and the
    layers take turns in whose result the model goes on with, so that it depends on the bytes of each.
    """

    def __init__(self, config: EngineConfig, groups: Sequence[GroupFacts], num_blocks: int) -> None:
        self._replicas = config.replicas
        self._stages = config.stages
        self._device = usable_device(config.device)
        self._model = Transformer(config.model, config.max_model_len, self._device)
        self._input_maker = InputMaker(groups, self._device, getattr(torch, config.model.dtype))
        # of each replica, one tensor per layer of a group
        self.kv_tensors = [_allocate_kv(config, num_blocks, self._device) for _ in range(config.replicas)]

    def rank_tensors(self, rank: int) -> list[torch.Tensor]:
        """Return the tensors of a rank, which has one replica of one pipeline stage.

        Each stage gets a contiguous share of the tensors; the shares are as even as possible.
        """
        stage, replica = divmod(rank, self._replicas)
        tensors = self.kv_tensors[replica]
        count = len(tensors)
        return tensors[stage * count // self._stages : (stage + 1) * count // self._stages]

    @torch.inference_mode()
    def launch(self, batch: Batch) -> torch.Tensor:
        """Run the forward pass and return logits [samples, vocab_size], without waiting for the device."""
        inputs = self._input_maker.make(batch.chunks)
        hidden = self._model.hidden(
            inputs.token_ids, inputs.positions, _PagedAttention(self.kv_tensors, inputs)
        )
        return self._model.logits(hidden[inputs.sample_rows])

    @torch.inference_mode()
    def sample(self, batch: Batch, logits: torch.Tensor) -> list[Token]:
        """Return the likeliest token for each chunk that samples, in order, with its log-probability."""
        picked, chosen = logits.log_softmax(dim=-1).max(dim=-1)
        return [Token(*pair) for pair in zip(chosen.tolist(), picked.tolist(), strict=True)]


class _PagedAttention:
    """The attention or recurrence of one step. Layer `l` is in group `l % groups` and in tensor `l // groups`."""

    def __init__(self, kv_tensors: Sequence[Sequence[torch.Tensor]], inputs: BatchInput) -> None:
        self._kv_tensors = kv_tensors
        self._groups = inputs.groups

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        tensor, index = divmod(layer, len(self._groups))
        group = self._groups[index]
        found = []
        for replica in self._kv_tensors:
            pages = replica[tensor]
            if isinstance(group, AttentionInput):
                write_kv(pages, group, key, value)
                found.append(attend(pages, group, query))
            else:
                found.append(recur(pages, group, query, key, value))
        return found[layer % len(found)]


def write_kv(pages: torch.Tensor, group: AttentionInput, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write the new tokens' keys and values to their blocks.

    Args:
        pages: one layer's KV tensor, [num_blocks, 2, block_tokens, kv_heads, head_dim].
        group: the input of the group that the layer belongs to.
        key: [tokens, kv_heads, head_dim].
        value: as `key`.
    """
    pages[group.write_blocks, 0, group.write_offsets] = key
    pages[group.write_blocks, 1, group.write_offsets] = value


def attend(pages: torch.Tensor, group: AttentionInput, query: torch.Tensor) -> torch.Tensor:
    """Return the attention output of the new tokens, whose own keys and values must have been written.

    Args:
        pages: as in `write_kv`.
        group: the input of the group that the layer belongs to.
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
    """Return the keys (half 0) or values (half 1) of a span's tokens, [1, kv_heads, keys, head_dim]."""
    return pages[span.blocks, half].flatten(0, 1)[span.keys].transpose(0, 1)[None]


def recur(
    pages: torch.Tensor,
    spans: Sequence[StateSpan],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Return the new tokens' outputs. Read each request's state from its read block, and write it to its write block.

    Args:
        pages: one layer's KV tensor, [num_blocks, 2, block_tokens, kv_heads, head_dim]. A state is stored in place of
            the first token's key; the rest of its page is unused.
        spans: one span for each request of the step.
        query: [tokens, heads, head_dim].
        key: [tokens, kv_heads, head_dim].
        value: as `key`.

    Returns:
        [tokens, heads, head_dim].
    """
    gate = torch.sigmoid(key + _GATE_BIAS)
    gained = torch.sqrt(1 - gate * gate) * value
    states = torch.cat([_states(pages, span, gate[span.rows], gained[span.rows]) for span in spans])
    return query * states.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _states(pages: torch.Tensor, span: StateSpan, gate: torch.Tensor, gained: torch.Tensor) -> torch.Tensor:
    """Return the state after each row of a span, and write the last state to the span's write block."""
    page = pages[:, 0, 0]
    state = torch.zeros_like(gained[0]) if span.read_block is None else page[span.read_block]
    found = torch.empty_like(gained)
    for row in range(len(gained)):
        state = torch.addcmul(gained[row], gate[row], state, out=found[row])
    page[span.write_block] = state
    return found


def usable_device(name: str) -> torch.device:
    """Return the device called `name`.

    Raises:
        ConfigError: there is no such device.
    """
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError([f"device {name!r} does not exist: torch sees {count} CUDA devices; use 'cpu'"])
    return device


def _allocate_kv(config: EngineConfig, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    model = config.model
    shape = (num_blocks, 2, config.block_tokens, model.kv_heads, model.head_dim)
    dtype = getattr(torch, model.dtype)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.layers_per_group)]
