from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.wire import Direction
from tests.remote.servers import Bucket, Mooncake
from tests.vllm.engine_rig import MARKS, Asked, Reported, check_same
from tests.vllm.sharing_rig import Apart, apart, sharing
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS

BLOCKS = 6
CACHED = BLOCKS * engines.BLOCK
LOAD, STORE = Direction.LOAD, Direction.STORE
_CHANCE = random.Random(3)


def draw() -> Asked:
    return Asked(tuple(_CHANCE.choices(range(256), k=CACHED + 9)))


PROMPT, OF_ADAPTER = draw(), draw()
TRAFFIC = {f"n{number}": draw() for number in range(4)}
PROMPTS = OF_FIRST, ABORTED, BEFORE_RESET, OF_SECOND = [
    {name: draw()} for name in ("first", "aborted", "reset", "second")
]
Answers = dict[str, Reported]


def test_r18_a_new_engine_finds_the_first_engines_prefix_and_no_blocks_of_adapters(
    bucket: Bucket, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    model = checkpoints.make("qwen3", tmp_path / "qwen3")
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    checkpoints.make_adapter(tmp_path / "adapter", seed=0)
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    with sharing(model, tmp_path, bucket.url, **lora) as first:
        expected = first.ask("n0", PROMPT)
        assert expected.cached == 0
        adapted = [first.ask(f"a{number}", OF_ADAPTER, lora_request=adapter) for number in range(3)]
        assert [each.cached for each in adapted] == [0, CACHED, CACHED]
        assert first.copied(STORE) == 0  # an adapter's blocks are not stored, even if they are found again
        first.ask("n1", PROMPT)
        assert first.copied(STORE) == BLOCKS
        first.rig.check_clean()
    assert (tmp_path / "kvoffload" / "weights.json").exists()

    checkpoints.make_adapter(tmp_path / "adapter", seed=1)
    with sharing(model, tmp_path, bucket.url, **lora) as second:
        found = second.ask("n0", PROMPT)
        check_same({"n0": found}, {"n0": expected})
        assert (found.cached, second.copied(LOAD)) == (CACHED, BLOCKS)
        assert second.ask("a0", OF_ADAPTER, lora_request=adapter).cached == 0
        second.rig.check_clean()


def start(both: list[Apart], *arguments: object) -> list[str]:
    for engine in both:
        engine.begin("start", *arguments)
    return [engine.end() for engine in both]


def stop(both: list[Apart]) -> None:
    for engine in both:
        engine.do("check")
        engine.do("stop")


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
            stop(both)
        both[0].do("start", others, tmp_path, bucket.url)
        found = check_not_found(both[0], OF_SECOND)
        assert found["second"].tokens != expected["second"].tokens
        stop(both[:1])
