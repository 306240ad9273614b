"""Tests vLLM's own scheduler under device pressure: requests that have loaded keep their blocks until they run (R19)."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.core.request import Requests
from tests.vllm.engine_rig import MARKS, prompt
from tests.vllm.line_rig import Line, scheduling
from tests.vllm.scheduler_rig import BLOCK, chunked_spec, full_spec, window_spec

pytestmark = MARKS

NO_RULE = patch.object(Requests, "has_room", return_value=True)
KINDS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [full_spec()],
    "windows": lambda: [full_spec(), *[window_spec(96)] * 3],
    "chunks": lambda: [full_spec(), *[chunked_spec(128)] * 2],
}
PREFIX, TAIL = 704, 512  # 22 and 16 blocks


def ask_two(line: Line) -> None:
    """Put two prompts on the host, and ask for both with more text, so that both load at the same time."""
    prompts = [prompt(number, PREFIX) for number in range(2)]
    line.put_on_host_only(*[(*one, 1) for one in prompts])
    line.holds_loads = True
    for number, one in enumerate(prompts):
        line.ask(f"r{number}", (*one, *prompt(10 + number, TAIL)))
    line.step()


# A loaded request holds 22 blocks of full attention, and 3 blocks in each window or 2 in each chunk. Its next step
# computes 512 tokens, which take 16 blocks in each of the groups: one more than are free.
@pytest.mark.parametrize(
    ("kind", "held", "needed", "most"),
    [("windows", 22 + 3 * 3, 4 * 16, 38 + 3 * 20), ("chunks", 22 + 2 * 2, 3 * 16, 38 + 2 * 21)],
)
def test_r19_two_loaded_requests_keep_each_other_from_running_unless_one_waits(
    folder: Path, kind: str, held: int, needed: int, most: int
) -> None:
    with NO_RULE, scheduling(folder, KINDS[kind](), 2 * held + needed - 1) as line:
        ask_two(line)
        line.holds_loads = False
        assert not line.finish()
        assert line.waiting_with_blocks == {"r0": held, "r1": held}
        assert line.free_blocks == needed - 1
    with scheduling(folder, KINDS[kind](), 2 * held + needed - 1) as line:
        ask_two(line)
        assert line.waiting_with_blocks == {"r0": held}
        assert line.core.state.requests.reserved == most
        line.holds_loads = False
        assert line.finish()
        assert (line.cached["r0"], line.cached["r1"]) == (PREFIX, PREFIX)
    with scheduling(folder, KINDS[kind](), 2 * most) as line:
        ask_two(line)
        assert line.waiting_with_blocks == {"r0": held, "r1": held}, "both fit"


def ask_many(line: Line, seed: int) -> None:
    """Ask for eight requests at once. Every second one finds a prefix on the host."""
    draw = random.Random(seed)
    prompts = [prompt(draw.randrange(1000), BLOCK * draw.choice([4, 16, 24])) for _ in range(8)]
    line.put_on_host_only(*[(*one, 1) for one in prompts[::2]])
    for number, one in enumerate(prompts):
        text = (*one, *prompt(draw.randrange(1000), draw.choice([20, 100, 500])))
        line.ask(f"r{number}", text, draw.choice([1, 300]), priority=draw.randrange(3))
    line.holds_loads = draw.choice([False, True])
    for _ in range(4):
        line.step()
    line.holds_loads = False


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", KINDS)
def test_r19_the_waiting_line_always_moves(folder: Path, kind: str, policy: str) -> None:
    preempted = waits = 0
    for blocks in (110, 125, 140):
        with scheduling(folder, KINDS[kind](), blocks, scheduling_policy=policy) as line:
            for seed in range(8):
                ask_many(line, seed)
                assert line.finish(), (blocks, seed, line.waiting_with_blocks)
                assert line.free_blocks == blocks
                assert line.core.audit() == []
                assert line.scheduler.reset_prefix_cache(reset_connector=True)
            preempted += line.preempted
            waits += line.waits_for_room
    assert preempted
    # With full attention, vLLM reserves all blocks that loaded requests need.
    assert (waits > 0) == (kind != "full")


@pytest.mark.parametrize("kind", KINDS)
def test_r19_with_enough_room_requests_find_as_many_tokens_as_without_the_rule(
    folder: Path, kind: str
) -> None:
    found: list[dict[str, int]] = []
    for rule in (NO_RULE, nullcontext()):
        with rule, scheduling(folder, KINDS[kind](), 1000) as line:
            ask_many(line, 1)
            assert line.finish()
            assert line.waits_for_room == 0
            found.append(line.cached)
    assert found[0] == found[1]
    assert sum(found[0].values()) > 0
