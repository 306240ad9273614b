from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.vllm.engine_rig import MARKS, Reported, Rig, check_reloads, offloading, same
from tests.vllm.stock import picture_model

pytestmark = MARKS

TEXT = [random.Random(1).randrange(256) for _ in range(70)]
CACHED = 96  # the tokens in whole blocks: a picture has 40 tokens and the text has 70


def picture(seed: int) -> Any:
    from PIL import Image

    edge = picture_model.EDGE
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (edge, edge, 3), dtype=np.uint8))


def ask(rig: Rig, *pictures: int, reads: bool = True) -> dict[str, Reported]:
    """Send the same text with each picture, all concurrently. Return the answers."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=None if reads else 0,  # a request with prompt log-probabilities reads no cache
    )
    rig.reported.clear()
    for seed in pictures:
        prompt = {"prompt_token_ids": TEXT, "multi_modal_data": {"image": picture(seed)}}
        rig.llm.llm_engine.add_request(f"{seed}", prompt, params)
    rig.finish()
    return dict(rig.reported)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    checkpoint = picture_model.make(tmp_path_factory.mktemp("blip2"))
    with offloading(
        "qwen3",
        checkpoint,
        checkpoint=checkpoint,
        skip_tokenizer_init=False,
        num_gpu_blocks_override=24,
        max_model_len=512,
        mm_hasher_algorithm="sha256",  # vLLM's default needs a package that is not in the lock
    ) as rig:
        yield rig


def test_answers_equal_those_of_an_uncached_run(rig: Rig) -> None:
    pictures = range(5)
    expected = ask(rig, *pictures, reads=False)
    assert not any(same(expected["0"], expected[name]) for name in "1234")
    rig.forget()

    def serve() -> bool:
        return all(same(one, expected[name]) for name, one in ask(rig, *pictures).items())

    check_reloads(rig, serve, len(pictures) * CACHED // 32)


def test_another_picture_finds_nothing_on_the_host(rig: Rig) -> None:
    rig.forget()
    cached = []
    for seed in (0, 1, 0, 1):
        cached += [one.cached for one in ask(rig, seed).values()]
        assert rig.scheduler.reset_prefix_cache()
    assert cached == [0, 0, CACHED, CACHED]
    rig.check_clean()
