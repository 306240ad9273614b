"""`vllm serve` of a stock vLLM starts on this machine with two workers, answers and is measured."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.vllm_stock import checkpoints, engines

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

COUNT = 12


def test_two_workers_answer_as_one_engine_does(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("gemma3", tmp_path / "gemma3")
    draw = random.Random(3)
    prompt = [draw.randrange(256) for _ in range(300)]
    with engines.in_process(checkpoint) as llm:
        (expected,) = engines.generate(llm, [prompt], COUNT)

    with engines.serving(
        checkpoint, tmp_path / "log", enable_prompt_tokens_details=True, **engines.TWO_WORKERS
    ) as server:
        first, again = (server.complete(prompt, COUNT) for _ in range(2))
        assert server.complete("some text", COUNT)["choices"][0]["text"]
        for answer in (first, again):
            assert tuple(answer["choices"][0]["token_ids"]) == expected.tokens
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
        assert server.metric("vllm:prefix_cache_hits_total") == 288
        assert server.metric("vllm:generation_tokens_total") == 3 * COUNT
        server.post("/reset_prefix_cache?reset_external=true")
        assert server.stop() == 0
