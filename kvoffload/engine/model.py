"""A decoder transformer: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

The random weights have a wide spread: attention scores have a standard deviation of about `_SCORE_STD`, so that heads
pick single tokens instead of averaging over all. A single wrong block then changes the output, so comparing outputs
tests the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

if TYPE_CHECKING:
    from kvoffload.engine.config import ModelConfig

_SCORE_STD = 3.0
_LOGIT_STD = 2.0
_RMS_EPS = 1e-6

# A function of (layer, query, key, value) that computes attention or recurrence. Tensors are [tokens, heads or
# kv_heads, head_dim]; the result has the shape of query.
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(NamedTuple):
    """The weights of one layer, as [out features, in features]. Norms have no weights."""

    qkv: torch.Tensor
    attention_out: torch.Tensor
    gate_up: torch.Tensor
    ffn_out: torch.Tensor


class Transformer:
    """The model without its KV cache. The caller provides the attention.

    The paged engine and a dense reference use this code with different attention.
    """

    def __init__(self, config: ModelConfig, max_model_len: int, device: torch.device) -> None:
        self._config = config
        draw = _Draw(config, device)
        self._embedding = draw(config.vocab_size, config.hidden_size, std=1.0)
        self._layers = [_draw_layer(config, draw) for _ in range(config.layers)]
        self._head = draw(config.vocab_size, config.hidden_size, std=_LOGIT_STD / config.hidden_size**0.5)
        self._cos, self._sin = _rotary_table(config, max_model_len, device)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Run all layers over token ids [tokens] at positions [tokens]; return [tokens, hidden_size]."""
        x = embedding(token_ids, self._embedding)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, x)
            if not self._config.is_recurrent(index):
                query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
            mixed = attention(index, query, key, value)
            x = x + linear(mixed.flatten(1), layer.attention_out)
            gate, up = linear(self._norm(x), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.ffn_out)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [rows, hidden_size] as [rows, vocab_size] in float32."""
        return linear(self._norm(hidden), self._head).float()

    def _project(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        config = self._config
        heads = linear(self._norm(x), layer.qkv).unflatten(-1, (-1, config.head_dim))
        query, key, value = heads.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
        return query, key, value

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self._config.hidden_size,), eps=_RMS_EPS)


class _Draw:
    """Draws random weights on the CPU, so that every device gets the same weights."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(config.seed)
        self._dtype = getattr(torch, config.dtype)
        self._device = device

    def __call__(self, rows: int, columns: int, std: float) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=self._generator) * std
        return weights.to(self._device, self._dtype)


def _draw_layer(config: ModelConfig, draw: _Draw) -> Layer:
    inputs, mixed = config.hidden_size, config.heads * config.head_dim
    # A score is a sum of head_dim products, divided by sqrt(head_dim). So its standard deviation is the product of the
    # query's and the key's standard deviations.
    query_key_std = (_SCORE_STD / inputs) ** 0.5
    query_key = draw((config.heads + config.kv_heads) * config.head_dim, inputs, std=query_key_std)
    value = draw(config.kv_heads * config.head_dim, inputs, std=inputs**-0.5)
    return Layer(
        torch.cat([query_key, value]),
        draw(inputs, mixed, std=mixed**-0.5),
        draw(2 * config.ffn_size, inputs, std=inputs**-0.5),
        draw(inputs, config.ffn_size, std=config.ffn_size**-0.5),
    )


def _rotary_table(
    config: ModelConfig, max_model_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [max_model_len, head_dim // 2].

    The table is computed on the CPU, so that all devices get the same values.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.arange(max_model_len, dtype=torch.float64)[:, None] * config.rope_base**-exponents
    dtype = getattr(torch, config.dtype)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to [tokens, heads, head_dim].

    The embedding pairs the first half of each head with the second half.
    """
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
