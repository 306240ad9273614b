"""Tests that engines share blocks through a real remote tier: one after the other, concurrently, and with two ranks
each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.remote.servers import Bucket, Mooncake
from tests.vllm.engine_rig import MARKS, Asked, Reported, check_same
from tests.vllm.stock import adapters, checkpoints
from tests.vllm.tiers_rig import BLOCKS, CACHED, LOAD, STORE, Apart, apart, draw, living, start, stop

pytestmark = MARKS

PROMPT, OF_ADAPTER = draw(3, 1), draw(4, 1)
TRAFFIC = draw(5, 4)
PROMPTS = OF_FIRST, ABORTED, BEFORE_RESET, OF_SECOND = [draw(seed, 1) for seed in range(6, 10)]
Answers = dict[str, Reported]


def test_r18_a_new_engine_finds_the_first_engines_prefix_and_no_blocks_of_adapters(
    bucket: Bucket, tmp_path: Path
) -> None:
    """Both engines load an adapter from the same path, but with different bytes. vLLM hashes only the path."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    adapters.make(tmp_path / "adapter", seed=0)
    with living("qwen3", tmp_path, bucket.url, **lora) as first:
        expected = first.ask_without_device(PROMPT)
        for cached in (0, CACHED, CACHED):
            (answer,) = first.ask_without_device(OF_ADAPTER, lora_request=adapter).values()
            assert answer.cached == cached
        assert first.copied(STORE) == 0  # an adapter's blocks are not stored, even if they are found again
        first.ask_without_device(PROMPT)
        assert first.copied(STORE) == BLOCKS
        first.rig.check_clean()
    assert (tmp_path / "kvoffload" / "weights.json").exists()

    adapters.make(tmp_path / "adapter", seed=1)
    with living("qwen3", tmp_path, bucket.url, **lora) as second:
        found = second.ask_without_device(PROMPT)
        check_same(found, expected)
        assert ([one.cached for one in found.values()], second.copied(LOAD)) == ([CACHED], BLOCKS)
        (other,) = second.ask_without_device(OF_ADAPTER, lora_request=adapter).values()
        assert other.cached == 0
        assert other.tokens != answer.tokens
        second.rig.check_clean()


def answers(engine: Apart, model: Path, folder: Path) -> Answers:
    engine.do("start", model, folder, None)
    found: Answers = {}
    for asked in (TRAFFIC, *PROMPTS):
        found |= engine.do("ask", asked)
    engine.do("stop")
    return found


def serve_at_once(both: list[Apart], expected: Answers) -> None:
    """Serve the same traffic on both engines, in opposite orders. Each engine finds prompts of the other."""
    for engine, traffic in zip(both, (TRAFFIC, dict(reversed(TRAFFIC.items()))), strict=True):
        engine.begin("ask", traffic)
    for engine in both:
        check_same(engine.end(), expected)


def share(engine: Apart, asked: dict[str, Asked], expected: Answers) -> None:
    """Serve a prefix again and again, until its blocks are in the remote tier."""
    had = engine.do("copied", STORE)
    while engine.do("copied", STORE) < had + BLOCKS:
        check_same(engine.do("ask", asked), expected)


def check_found(engine: Apart, asked: dict[str, Asked], expected: Answers) -> None:
    """Check that the engine finds a prefix that the other engine has written, and gives the same answer."""
    had = engine.do("copied", LOAD)
    found = engine.do("ask", asked)
    check_same(found, expected)
    assert ([each.cached for each in found.values()], engine.do("copied", LOAD)) == ([CACHED], had + BLOCKS)


def check_not_found(engine: Apart, asked: dict[str, Asked]) -> Answers:
    had = engine.do("copied", LOAD)
    found: Answers = engine.do("ask", asked)
    assert {each.cached for each in found.values()} == {0}
    assert engine.do("copied", LOAD) == had
    return found


def share_in_turns(both: list[Apart], expected: Answers) -> None:
    """Share prefixes between two engines that run concurrently, with aborts and a reset."""
    first, second = both
    for _ in range(3):
        serve_at_once(both, expected)
    for asked in PROMPTS[:3]:
        share(first, asked, expected)
    share(second, OF_SECOND, expected)
    check_found(first, OF_SECOND, expected)
    check_found(second, OF_FIRST, expected)
    for steps in (0, 1, 2):
        second.do("ask", ABORTED, steps)
    check_same(second.do("ask", ABORTED), expected)
    assert first.do("reset")
    for asked in (BEFORE_RESET, OF_SECOND):
        check_same(check_not_found(first, asked), expected)
    check_found(second, BEFORE_RESET, expected)


@pytest.mark.timeout(900)
def test_r17_r18_concurrent_engines_share_blocks_but_not_with_other_weights(
    mooncake: Mooncake, bucket: Bucket, tmp_path: Path
) -> None:
    model = checkpoints.make("qwen3", tmp_path / "qwen3")
    others = checkpoints.make("qwen3", tmp_path / "others", seed=1)
    with apart(2) as both:
        expected = answers(both[0], model, tmp_path)
        for server in (mooncake, bucket):
            one, other = start(both, model, tmp_path, server.url)
            assert one == other
            share_in_turns(both, expected)
            stop(*both)
        both[0].do("start", others, tmp_path, bucket.url)
        different = check_not_found(both[0], OF_SECOND)
        assert all(different[name].tokens != expected[name].tokens for name in OF_SECOND)
        stop(both[0])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_r18_two_ranks_share_blocks_with_two_ranks_and_not_with_one(url: str, tmp_path: Path) -> None:
    model = checkpoints.make("qwen3", tmp_path / "qwen3")
    with apart(2) as (first, second):
        expected = answers(first, model, tmp_path)
        shared = first.do("start", model, tmp_path, url, 2)
        share(first, OF_FIRST, expected)
        check_same(check_not_found(first, OF_SECOND), expected)
        # Stop the first engine: its ranks spin while they wait, and four spinning ranks would leave two cores
        # no time for other work.
        stop(first)
        assert second.do("start", model, tmp_path, url, 2) == shared
        check_found(second, OF_FIRST, expected)
        share(second, OF_SECOND, expected)
        stop(second)
        assert first.do("start", model, tmp_path, url, 1) != shared
        check_same(check_not_found(first, OF_FIRST), expected)
        stop(first)
