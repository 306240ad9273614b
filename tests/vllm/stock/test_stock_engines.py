"""Tests the references that other tests compare with: the small models on vLLM, and vLLM's own connector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.vllm.engine_rig import MARKS, prompt
from tests.vllm.stock import checkpoints, engines

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = MARKS


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_tokens_equal_those_of_transformers(kind: checkpoints.Kind, folder: Path) -> None:
    """The prompt is longer than a step's token budget, and longer than a window."""
    checkpoint = checkpoints.make(kind, folder / kind)
    with engines.in_process(checkpoint) as llm:
        (answer,) = engines.generate(llm, [prompt(7, 300)], 16)
    assert answer.tokens == by_transformers(checkpoint, prompt(7, 300), 16)


def by_transformers(checkpoint: Path, text: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the tokens that transformers generates without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    tokens = list(text)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(text) :])


SMALL: dict[str, dict[str, int]] = {  # The device has room for one prompt, but not for all three.
    "qwen3": {"num_gpu_blocks_override": 24, "max_model_len": 640},
    "gemma3": {"num_gpu_blocks_override": 40, "max_model_len": 640},
}


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_the_peer_finds_blocks_on_the_host_and_changes_no_token(kind: checkpoints.Kind, folder: Path) -> None:
    from tests.vllm.stock import peer

    checkpoint = checkpoints.make(kind, folder / kind)
    with engines.in_process(checkpoint, **SMALL[kind]) as plain:
        expected = ask_twice(plain)
    assert [answer.cached for answer in expected] == [0] * 6  # without a connector, there are no hits
    for inline in (False, True):  # the peer copies on its thread, then inside the hook
        transfer = peer.kv_transfer(1 << 26, inline=inline)
        with engines.in_process(checkpoint, kv_transfer_config=transfer, **SMALL[kind]) as offloading:
            answers = ask_twice(offloading)
            engines.drain(offloading)
            assert engines.held_blocks(offloading) == 0
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        assert sum(answer.cached for answer in answers) >= 3 * 512


def ask_twice(llm: LLM) -> list[engines.Answer]:
    """Serve prompts that evict each other from the device, one after the other, twice."""
    texts = [prompt(seed, 600) for seed in range(3)]
    return [engines.generate(llm, [text], 8)[0] for text in texts * 2]
