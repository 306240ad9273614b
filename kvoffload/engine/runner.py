"""Runs the model over a step's batch, on one device, with the KV cache in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvoffload.engine.attention import attend, write_kv
from kvoffload.engine.batch_input import BatchInput, InputMaker, RecurrentInput
from kvoffload.engine.errors import ConfigError
from kvoffload.engine.model import Transformer
from kvoffload.engine.recurrence import recur
from kvoffload.engine.request import Token

if TYPE_CHECKING:
    from kvoffload.engine.config import EngineConfig
    from kvoffload.engine.plugin import GroupFacts
    from kvoffload.engine.scheduler import Batch


class Runner:
    """Owns the weights and the physical KV tensors.

    There is one KV tensor per layer of a group, [num_blocks, 2, block_tokens, kv_heads, head_dim]; layers of
    different groups share it, in blocks of their own.
    """

    def __init__(self, config: EngineConfig, groups: Sequence[GroupFacts], num_blocks: int) -> None:
        self._ranks = config.ranks
        self._device = usable_device(config.device)
        self._model = Transformer(config.model, config.max_model_len, self._device)
        self._input_maker = InputMaker(groups, self._device, getattr(torch, config.model.dtype))
        self.kv_tensors = _allocate_kv(config, num_blocks, self._device)

    def rank_tensors(self, rank: int) -> list[torch.Tensor]:
        """The tensors of one pipeline stage: a contiguous share, as even as it goes."""
        count = len(self.kv_tensors)
        return self.kv_tensors[rank * count // self._ranks : (rank + 1) * count // self._ranks]

    @torch.inference_mode()
    def launch(self, batch: Batch) -> torch.Tensor:
        """The forward pass; returns logits [samples, vocab_size]. Does not wait for the device."""
        inputs = self._input_maker.make(batch.chunks)
        hidden = self._model.hidden(inputs.token_ids, inputs.positions, self._paged_attention(inputs))
        return self._model.logits(hidden[inputs.sample_rows])

    @torch.inference_mode()
    def sample(self, batch: Batch, logits: torch.Tensor) -> list[Token]:
        """The likeliest token for each chunk that samples, in order, with its log-probability."""
        picked, chosen = logits.log_softmax(dim=-1).max(dim=-1)
        return [Token(*pair) for pair in zip(chosen.tolist(), picked.tolist(), strict=True)]

    def _paged_attention(self, inputs: BatchInput) -> _PagedAttention:
        return _PagedAttention(self.kv_tensors, inputs)


class _PagedAttention:
    """Attention or recurrence of one step: layer `l` is in group `l % groups` and in tensor `l // groups`."""

    def __init__(self, kv_tensors: Sequence[torch.Tensor], inputs: BatchInput) -> None:
        self._kv_tensors = kv_tensors
        self._groups = inputs.groups

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        tensor, index = divmod(layer, len(self._groups))
        pages, group = self._kv_tensors[tensor], self._groups[index]
        if isinstance(group, RecurrentInput):
            return recur(pages, group, query, key, value)
        write_kv(pages, group, key, value)
        return attend(pages, group, query)


def usable_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: there is no such device.
    """
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError([f"device {name!r} does not exist: torch sees {count} CUDA devices; use 'cpu'"])
    return device


def block_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of one block over all the given tensors."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)


def _allocate_kv(config: EngineConfig, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    model = config.model
    shape = (num_blocks, 2, config.block_tokens, model.kv_heads, model.head_dim)
    dtype = getattr(torch, model.dtype)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.layers_per_group)]
