"""The counting model: its tokens equal those computed without blocks, and it detects every wrong byte."""

from __future__ import annotations

import random

import pytest

from kvoffload.engine import Engine, EngineConfig, ModelConfig, SamplingParams
from tests.engine.tiny import drain, taken
from tests.simulate.counting import VOCABULARY, CountingRunner, expected

SHAPES = {
    "full": ModelConfig(vocab_size=VOCABULARY, layers=2),
    "window": ModelConfig(
        vocab_size=VOCABULARY, layers=6, attention="sliding_window", window_tokens=7, local_per_full=2
    ),
    "chunked": ModelConfig(
        vocab_size=VOCABULARY, layers=4, attention="chunked_local", chunk_tokens=6, local_per_full=1
    ),
    "recurrent": ModelConfig(vocab_size=VOCABULARY, layers=6, attention="recurrent", local_per_full=2),
}


def make(shape: str, num_blocks: int = 100) -> tuple[Engine, CountingRunner]:
    config = EngineConfig(
        model=SHAPES[shape], block_tokens=3, num_blocks=num_blocks, max_model_len=64, step_tokens=8
    )
    engine = Engine(config, clock=lambda: 0.0, make_runner=CountingRunner)
    assert isinstance(engine.runner, CountingRunner)
    return engine, engine.runner


def answers(engine: Engine, *prompts: list[int]) -> list[list[int]]:
    streams = [engine.submit(prompt, SamplingParams(5)) for prompt in prompts]
    drain(engine)
    return [[token.token_id for token in taken(stream)] for stream in streams]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_engine_answers_what_is_expected_in_chunks_crowded_and_with_its_prefix_cache(shape: str) -> None:
    draws = random.Random(0)
    base = draws.choices(range(100), k=30)
    prompts = [
        base[: draws.randint(1, 30)] + draws.choices(range(100), k=draws.randint(0, 9)) for _ in range(6)
    ]
    engine, runner = make(shape, num_blocks=60)
    for _ in range(2):
        should = [expected(engine.facts.groups, len(runner.kv_tensors), prompt, 5, 0) for prompt in prompts]
        assert answers(engine, *prompts) == should
    assert not runner.wrong


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_byte_is_a_wrong_token_and_is_named(shape: str) -> None:
    engine, runner = make(shape)
    prompt = list(range(12))
    answers(engine, prompt)
    runner.kv_tensors[-1] ^= 1  # The device still has the prefix, in blocks with wrong contents.
    should = [expected(engine.facts.groups, len(runner.kv_tensors), [*prompt, 5], 5, 0)]
    assert answers(engine, [*prompt, 5]) != should
    assert "read wrong KV" in runner.wrong[0]


def test_other_weights_make_other_tokens() -> None:
    engine, runner = make("full")
    prompt = list(range(12))
    before = answers(engine, prompt)
    runner.weights += 1
    assert engine.reset_prefix_cache()
    after = answers(engine, prompt)
    assert after != before
    assert after == [expected(engine.facts.groups, 2, prompt, 5, 1)]
    assert not runner.wrong


def test_kv_of_other_weights_is_wrong() -> None:
    engine, runner = make("full")
    prompt = list(range(12))
    answers(engine, prompt)
    runner.weights += 1
    answers(engine, prompt)
    assert runner.wrong
