from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from tests.vllm.stock import checkpoints, engines

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

COUNT = 16


def prompts() -> list[list[int]]:
    """Return prompts. Some have a common prefix, some are longer than a step's token budget, some longer than
    the window.
    """
    draw = random.Random(7)
    shared = [draw.randrange(256) for _ in range(160)]
    own = [[draw.randrange(256) for _ in range(length)] for length in (5, 100, 300, 33)]
    return [*own, *(shared + tail for tail in own)]


@cache
def computed(checkpoint: Path) -> list[engines.Answer]:
    with engines.in_process(checkpoint, enable_prefix_caching=False) as llm:
        return engines.generate(llm, prompts(), COUNT)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_prefix_caching_changes_no_token(kind: checkpoints.Kind, folder: Path) -> None:
    checkpoint, asked = checkpoints.make(kind, folder / kind), prompts()
    expected = computed(checkpoint)
    with engines.in_process(checkpoint, enable_prefix_caching=True) as caching:
        first = engines.generate(caching, asked, COUNT)
        again = engines.generate(caching, asked, COUNT)
        assert engines.held_blocks(caching) == 0

    assert [answer.cached for answer in expected] == [0] * len(asked)
    assert sum(answer.cached for answer in again) > sum(len(prompt) for prompt in asked) // 2
    for answers in (first, again):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        for answer, right in zip(answers, expected, strict=True):
            assert answer.logprobs == pytest.approx(right.logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_tokens_equal_those_of_transformers(kind: checkpoints.Kind, folder: Path) -> None:
    checkpoint = checkpoints.make(kind, folder / kind)
    assert list(computed(checkpoint)[2].tokens) == by_transformers(checkpoint, prompts()[2])


def test_two_steps_in_flight_change_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, asked = checkpoints.make("gemma3", folder / "gemma3"), prompts()
    expected = computed(checkpoint)
    for name, value in engines.TWO_STEPS.items():
        monkeypatch.setenv(name, value)
    with engines.in_process(checkpoint) as overlapping:
        assert overlapping.llm_engine.vllm_config.max_concurrent_batches == 2
        answers = engines.generate(overlapping, asked, COUNT)
        engines.drain(overlapping)
        assert engines.held_blocks(overlapping) == 0
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


def by_transformers(checkpoint: Path, prompt: list[int]) -> list[int]:
    """Return the tokens that transformers generates without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(COUNT):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
