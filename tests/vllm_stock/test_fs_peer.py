"""vLLM's own `fs` tier runs on this machine: it stores to files, the next engine loads from them, and changes no token."""

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
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

COUNT, BLOCKS = 8, 18
_draw = random.Random(11)
PROMPTS = [[_draw.randrange(256) for _ in range(BLOCKS * engines.BLOCK + 9)] for _ in range(3)]


def test_what_one_engine_stores_to_files_the_next_one_loads(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("qwen3", tmp_path / "qwen3")
    with engines.in_process(checkpoint) as plain:
        expected = [answer.tokens for answer in engines.generate(plain, PROMPTS, COUNT)]

    assert ask(checkpoint, tmp_path) == ([0] * 3, expected)
    files = [*tmp_path.rglob("*.bin")]
    assert len(files) == 3 * BLOCKS
    assert ask(checkpoint, tmp_path) == ([BLOCKS * engines.BLOCK] * 3, expected)

    for file in files:  # so the bytes are those of the files
        file.write_bytes(bytes(file.stat().st_size))
    cached, tokens = ask(checkpoint, tmp_path)
    assert cached == [BLOCKS * engines.BLOCK] * 3
    assert all(one != other for one, other in zip(tokens, expected, strict=True))


def ask(checkpoint: Path, folder: Path) -> tuple[list[int], list[tuple[int, ...]]]:
    """Start an engine, and return how many tokens of each prompt it did not compute, and its answers."""
    from tests.vllm_stock import fs_peer

    transfer = fs_peer.kv_transfer(1 << 24, folder / "disk")
    with engines.in_process(checkpoint, kv_transfer_config=transfer) as offloading:
        answers = [engines.generate(offloading, [prompt], COUNT)[0] for prompt in PROMPTS]
        engines.drain(offloading)
        assert engines.held_blocks(offloading) == 0
    return [answer.cached for answer in answers], [answer.tokens for answer in answers]
