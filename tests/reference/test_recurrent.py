from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest

from tests.reference.rig import BLOCK, Rig, on_host_only, rig, text

PREFIX = 6 * BLOCK
PROMPT = text(1, 8 * BLOCK + 1)


def sharers(count: int) -> list[tuple[int, ...]]:
    return [(*text(0, PREFIX), *text(100 + number, 2 * BLOCK + 1)) for number in range(count)]


def found_one_by_one(made: Rig, prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Serve the prompts, each with an empty device cache; return how many tokens each finds on the host."""
    found = []
    for prompt in prompts:
        made.forget_device()
        made.run(prompt, 1)
        found.append(made.streams[-1][2].stats.external_tokens)
    return found


@pytest.mark.parametrize(("are_on", "found"), [(True, PREFIX), (False, 0)])
def test_a_shared_prefix_is_found_from_the_third_request_on(are_on: bool, found: int) -> None:
    with rig("recurrent", step_tokens=64, extra={"recurrent_prefix_boundaries": are_on}) as made:
        assert found_one_by_one(made, sharers(6)) == [0, 0, *[found] * 4]
        for what in ("asked", "made"):
            assert made.counts().total(f"kvoffload_prefix_boundaries_{what}_total") == int(are_on)
        assert made.count("miss_blocks", "no_state") > 0
        made.assert_clean()


def steps_of(made: Rig, prompt: tuple[int, ...]) -> int:
    """Return the number of steps in which the engine computes a prompt."""
    with mock.patch.object(made.engine.runner, "launch", wraps=made.engine.runner.launch) as launch:
        made.forget_device()
        made.run(prompt, 1)
    return launch.call_count


def test_a_boundary_costs_one_step_and_only_for_shared_prefixes() -> None:
    costs = {}
    prompts = [*sharers(2), *[text(seed, 8 * BLOCK + 1) for seed in range(20, 26)]]
    for are_on in (False, True):
        with rig("recurrent", step_tokens=64, extra={"recurrent_prefix_boundaries": are_on}) as made:
            costs[are_on] = [steps_of(made, prompt) for prompt in prompts]
    assert costs[False] == [2] * 8  # one step ends at the last whole block, and one step computes the rest
    assert costs[True] == [2, 3, *[2] * 6]


def test_a_load_copies_only_the_last_state() -> None:
    with rig("recurrent") as made:
        on_host_only(made, PROMPT)
        before = made.counts()
        made.run(PROMPT)
        gained = made.counts().minus(before)
        groups = made.engine.config.model.num_groups
        assert gained.count("kvoffload_state_blocks_total", "load") == groups - 1
        assert gained.count("kvoffload_load_blocks_total", "loaded") == 8 + groups - 1
        made.assert_clean()
