from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.vllm.stock import checkpoints, engines

if TYPE_CHECKING:
    from pathlib import Path

    from vllm import LLM

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

COUNT = 8
SMALL: dict[str, dict[str, int]] = {  # The device has room for one prompt, but not for all three.
    "qwen3": {"num_gpu_blocks_override": 24, "max_model_len": 640},
    "gemma3": {"num_gpu_blocks_override": 40, "max_model_len": 640},
}


def prompts() -> list[list[int]]:
    """Return prompts that evict each other from the device when they are served one after the other."""
    draw = random.Random(11)
    return [[draw.randrange(256) for _ in range(600)] for _ in range(3)]


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_the_peer_finds_blocks_on_the_host_and_changes_no_token(
    kind: checkpoints.Kind, tmp_path: Path
) -> None:
    checkpoint = checkpoints.make(kind, tmp_path / kind)
    with engines.in_process(checkpoint, **SMALL[kind]) as plain:
        expected = ask_twice(plain)
    assert [answer.cached for answer in expected] == [0] * 6  # without a connector, no prompt is found again
    for inline in (False, True):  # the peer copies on its thread, then inside the hook
        check_hits(kind, checkpoint, inline, expected)


def check_hits(
    kind: checkpoints.Kind, checkpoint: Path, inline: bool, expected: list[engines.Answer]
) -> None:
    from tests.vllm.stock import peer

    with engines.in_process(
        checkpoint, kv_transfer_config=peer.kv_transfer(1 << 26, inline=inline), **SMALL[kind]
    ) as offloading:
        answers = ask_twice(offloading)
        engines.drain(offloading)
        assert engines.held_blocks(offloading) == 0

    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert sum(answer.cached for answer in answers) >= 3 * 512


def ask_twice(llm: LLM) -> list[engines.Answer]:
    return [engines.generate(llm, [prompt], COUNT)[0] for prompt in prompts() * 2]
