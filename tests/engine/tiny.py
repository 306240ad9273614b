"""Tiny engines that a test steps itself, and a simple forward pass to compare them with."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvoffload.engine import Engine, EngineConfig, ModelConfig, SamplingParams, Token, TokenStream
from kvoffload.engine.model import Transformer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.engine.plugin import EnginePlugin

BLOCK = 4
KINDS = ("full", "sliding_window", "chunked_local", "recurrent")
SPANS: dict[str, dict[str, int]] = {
    "full": {},
    "sliding_window": {"window_tokens": 7},
    "chunked_local": {"chunk_tokens": 8},
    "recurrent": {},
}


def tiny_model(kind: str, overrides: dict[str, int]) -> ModelConfig:
    dims = {"vocab_size": 64, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_size": 48}
    layers = {"layers": 2} if kind == "full" else {"layers": 3, "local_per_full": 2}
    settings: dict[str, Any] = {"attention": kind, **dims, **layers, **SPANS[kind], **overrides}
    return ModelConfig(**settings)


def tiny_config(
    kind: str = "full", *, model: dict[str, int] | None = None, **settings: object
) -> EngineConfig:
    usual = {"block_tokens": BLOCK, "num_blocks": 200, "max_model_len": 128, "step_tokens": 16}
    given: dict[str, Any] = {**usual, **settings}
    return EngineConfig(model=tiny_model(kind, model or {}), **given)


def tiny_engine(
    kind: str = "full",
    plugin_instance: EnginePlugin | None = None,
    **settings: Any,  # noqa: ANN401
) -> Engine:
    """Return an engine that the test steps. Each reading of its clock adds one second."""
    ticks = iter(range(1_000_000))
    return Engine(tiny_config(kind, **settings), plugin_instance, clock=lambda: float(next(ticks)))


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in torch.randint(64, (count,), generator=torch.Generator().manual_seed(seed))]


def drain(engine: Engine, limit: int = 2000) -> None:
    """Step the engine until it has no work, and audit it after each step."""
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
        assert engine.audit() == []
    raise AssertionError(f"not drained after {limit} steps: {engine.statistics()}")


def assert_idle(engine: Engine) -> None:
    """Check that the audit passes, that no request is open, and that every block is free."""
    assert engine.audit() == []
    numbers = engine.statistics()
    assert (numbers.waiting, numbers.loading, numbers.running, numbers.leased_blocks) == (0, 0, 0, 0)
    assert numbers.free_blocks == engine.pool.usable_blocks


def taken(stream: TokenStream) -> list[Token]:
    """Return the tokens that the stream has received, without waiting for more."""
    found: list[Token] = []
    while not stream._arrived.empty():
        item = stream._arrived.get_nowait()
        if isinstance(item, StopAsyncIteration):
            break
        if isinstance(item, BaseException):
            raise item
        found.append(item)
    return found


def served(engine: Engine, prompt: Sequence[int], new_tokens: int = 6) -> TokenStream:
    """Serve a prompt until the engine has no work; return its stream, which has received all tokens."""
    stream = engine.submit(prompt, SamplingParams(new_tokens))
    drain(engine)
    return stream


def run(engine: Engine, prompt: Sequence[int], new_tokens: int = 6) -> list[Token]:
    return taken(served(engine, prompt, new_tokens))


@cache
def alone(kind: str, length: int, seed: int, new_tokens: int) -> list[Token]:
    """Return the answer of a new engine that serves only this prompt."""
    return run(tiny_engine(kind, step_tokens=128), tokens(length, seed), new_tokens)


def dense(config: EngineConfig, prompt: Sequence[int], new_tokens: int = 6) -> list[Token]:
    """Return greedy tokens, each from a forward pass over the whole text, without pages, chunks or caches."""
    model = Transformer(config.model, config.max_model_len, torch.device("cpu"))
    known, found = list(prompt), []
    for _ in range(new_tokens):
        hidden = model.hidden(torch.tensor(known), torch.arange(len(known)), _DenseAttention(config.model))
        logprobs = model.logits(hidden[-1:]).log_softmax(-1)[0]
        found.append(Token(int(logprobs.argmax()), float(logprobs.max())))
        known.append(found[-1].token_id)
    return found


class _DenseAttention:
    """Computes attention with a mask, and recurrent states token by token."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        count, heads, dim = query.shape
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        if self._model.attention == "recurrent" and not self._is_full(layer):
            return query * torch.stack([self._state(key, value, last) for last in range(count)])
        scores = torch.einsum("qhd,khd->hqk", query, key) / dim**0.5
        seen = torch.tensor([[self._sees(layer, q, k) for k in range(count)] for q in range(count)])
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)

    def _sees(self, layer: int, query: int, key: int) -> bool:
        model = self._model
        if key > query or self._is_full(layer):
            return key <= query
        if model.window_tokens:
            return query - key < model.window_tokens
        assert model.chunk_tokens
        return query // model.chunk_tokens == key // model.chunk_tokens

    def _is_full(self, layer: int) -> bool:
        return self._model.attention == "full" or (layer + 1) % (self._model.local_per_full + 1) == 0

    @staticmethod
    def _state(key: torch.Tensor, value: torch.Tensor, last: int) -> torch.Tensor:
        """Return the sum of the values up to token `last`, each multiplied by the gates of all later tokens."""
        gates = torch.sigmoid(key[: last + 1] + 3.0)
        behind = [gates[token + 1 :].prod(0) for token in range(last + 1)]
        return ((1 - gates**2).sqrt() * value[: last + 1] * torch.stack(behind)).sum(0)


def assert_same(found: Sequence[Token], expected: Sequence[Token], tolerance: float = 1e-4) -> None:
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    assert all(abs(a.logprob - b.logprob) <= tolerance for a, b in zip(found, expected, strict=True))
