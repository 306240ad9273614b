from __future__ import annotations

from typing import Any

import pytest

from kvoffload.engine import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    PluginError,
    RequestRefused,
    SamplingParams,
)
from kvoffload.engine.plugin import load_plugin
from tests.engine.tiny import tiny_engine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 0}, "heads must be positive, not 0"),
        ({"heads": 6, "kv_heads": 4}, r"heads \(6\) must be a multiple of kv_heads \(4\)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"attention": "linear"}, "attention must be one of 'full', .* 'recurrent', not 'linear'"),
        ({"dtype": "int8"}, "dtype must be one of 'float32', 'bfloat16', not 'int8'"),
        ({"attention": "sliding_window"}, "window_tokens must be a positive number with attention="),
        ({"window_tokens": 8}, 'window_tokens goes with attention="sliding_window" only, not with "full"'),
        (
            {"attention": "chunked_local", "chunk_tokens": 8, "layers": 7},
            r"layers \(7\) must be a multiple of 6",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_tokens": 0}, "block_tokens must be positive"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"device": "tpu"}, 'device must be "cpu", "cuda" or "cuda:N", not \'tpu\''),
        ({"device": "cuda:99"}, "'cuda:99' does not exist"),
        ({"ranks": 3}, "ranks must be at most 2, the layers in each group, not 3"),
        (
            {"kind": "chunked_local", "model": {"chunk_tokens": 10}},
            r"chunk_tokens \(10\) must be a multiple of",
        ),
    ],
)
def test_an_engine_that_cannot_be_built_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_engine(**settings)


def test_all_impossible_numbers_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(block_tokens=0, step_tokens=-1, device="abacus")
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="must be"):
        SamplingParams(max_new_tokens=0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([3, 64], "token 64 is not in the vocabulary of 64 tokens"), ([-1], "-1")],
)
def test_an_invalid_prompt_is_refused(prompt: list[int], message: str) -> None:
    engine = tiny_engine()
    with pytest.raises(RequestRefused, match=message):
        engine.submit(prompt)
    assert not engine.has_work


def test_the_error_for_an_unknown_plugin_names_the_installed_ones() -> None:
    with pytest.raises(
        PluginError, match=r"no engine plugin is called 'moving'; installed in .*: .*kvoffload"
    ):
        load_plugin("moving")
