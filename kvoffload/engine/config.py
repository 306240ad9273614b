"""Configuration objects, which are frozen and fully checked when they are created."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvoffload.engine.errors import ConfigError

GroupKind = Literal["full", "sliding_window", "chunked_local", "recurrent"]
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder transformer with weights drawn from a seed.

    With `attention="full"` all layers attend to everything. Otherwise the layers repeat a pattern: `local_per_full`
    local layers (sliding window, chunked local or recurrent), then one full layer.
    """

    vocab_size: int = 256  # tokens are bytes by default
    layers: int = 6
    hidden_size: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 1408
    attention: GroupKind = "full"
    window_tokens: int | None = None  # for "sliding_window"; includes the attending token itself
    chunk_tokens: int | None = None  # for "chunked_local"
    local_per_full: int = 5
    rope_base: float = 10_000.0
    dtype: DType = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        _raise_if_any(self._problems())

    @property
    def num_groups(self) -> int:
        """Return the number of groups of layers that share a block table."""
        return 1 if self.attention == "full" else self.local_per_full + 1

    @property
    def layers_per_group(self) -> int:
        """Return the number of layers in each group, which is also the number of physical KV tensors."""
        return self.layers // self.num_groups

    def is_recurrent(self, layer: int) -> bool:
        return self.attention == "recurrent" and (layer + 1) % self.num_groups != 0

    def _problems(self) -> Iterator[str]:
        positive = "vocab_size layers hidden_size heads kv_heads head_dim ffn_size local_per_full rope_base"
        yield from _not_positive(self, positive)
        yield from _not_allowed("attention", self.attention, get_args(GroupKind))
        yield from _not_allowed("dtype", self.dtype, get_args(DType))
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            yield f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
        if self.head_dim % 2:
            yield f"head_dim must be even for rotary embedding, not {self.head_dim}"
        if self.local_per_full > 0 and self.layers % self.num_groups:
            yield (
                f"layers ({self.layers}) must be a multiple of {self.num_groups}: with {self.attention} attention, "
                f"{self.local_per_full} local layers and one full layer take turns"
            )
        yield from self._span_problems("window_tokens", "sliding_window", self.window_tokens)
        yield from self._span_problems("chunk_tokens", "chunked_local", self.chunk_tokens)

    def _span_problems(self, name: str, kind: GroupKind, tokens: int | None) -> Iterator[str]:
        if self.attention == kind and (tokens is None or tokens < 1):
            yield f'{name} must be a positive number with attention="{kind}", not {tokens}'
        if self.attention != kind and tokens is not None:
            yield f'{name} goes with attention="{kind}" only, not with "{self.attention}"'


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one engine, with its plugin's settings."""

    model: ModelConfig = field(default_factory=ModelConfig)
    block_tokens: int = 16
    num_blocks: int | None = None  # includes the null block; None makes room for 4 requests of full length
    max_model_len: int = 4096
    step_tokens: int = 512  # token budget of one step, over all its requests
    max_requests: int = 64  # the maximum number of requests that run or load at the same time
    ranks: int = 1  # the number of workers, all in this process
    replicas: int = (
        1  # how many ranks, with consecutive numbers, each have the whole KV of one pipeline stage
    )
    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    plugin_config: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _raise_if_any(self._problems())

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.ranks // max(self.replicas, 1)

    def _problems(self) -> Iterator[str]:
        yield from _not_positive(self, "block_tokens max_model_len step_tokens max_requests ranks replicas")
        if self.num_blocks is not None and self.num_blocks < 2:
            yield f"num_blocks must be at least 2 (one is the null block), not {self.num_blocks}"
        if self.replicas > 0 and self.ranks % self.replicas:
            yield f"ranks ({self.ranks}) must be a multiple of replicas ({self.replicas})"
        if self.stages > self.model.layers_per_group:
            yield (
                f"ranks must be at most {self.model.layers_per_group}, the layers in each group, not {self.stages}: "
                f"every rank needs at least one layer, unless it is a replica"
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            yield f'device must be "cpu", "cuda" or "cuda:N", not {self.device!r}'
        chunk = self.model.chunk_tokens
        if chunk and self.block_tokens > 0 and chunk % self.block_tokens:
            yield f"chunk_tokens ({chunk}) must be a multiple of block_tokens ({self.block_tokens})"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling settings of one request. The engine always chooses the likeliest token."""

    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        _raise_if_any(_not_positive(self, "max_new_tokens"))


def _not_positive(config: object, names: str) -> Iterator[str]:
    for name in names.split():
        if getattr(config, name) <= 0:
            yield f"{name} must be positive, not {getattr(config, name)}"


def _not_allowed(name: str, value: str, allowed: tuple[str, ...]) -> Iterator[str]:
    if value not in allowed:
        yield f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}"


def _raise_if_any(problems: Iterator[str]) -> None:
    if found := list(problems):
        raise ConfigError(found)
