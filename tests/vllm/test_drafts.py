"""Tests speculative decoding on a stock vLLM. Answers must equal those of an engine without connector and drafts.

One engine starts per kind of drafts. `test_draft_settings.py` has further settings, and `versions/test_speculation.py`
fewer scenes for each version of vLLM.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.vllm.drafts_rig import (
    BLOCK,
    KINDS,
    LONG,
    REQUESTS,
    check_acceptance,
    check_scene,
    draft_regions,
    drafting,
    serve_alone,
    without_connector_and_drafts,
)
from tests.vllm.engine_rig import MARKS, Reported
from tests.vllm.scenes import SCENES, Scene, Stage, failed, found_one_by_one, reloaded

pytestmark = MARKS


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Reported]:
    return without_connector_and_drafts(folder)


@pytest.fixture(scope="module")
def found_without_drafts(folder: Path, expected: dict[str, Reported]) -> list[int]:
    """Return how many tokens of each request are found on the host if there are no drafts."""
    with drafting(None, folder, expected) as on:
        return found_on_host(on)


def found_on_host(on: Stage) -> list[int]:
    on.put_on_host()
    return found_one_by_one(on, list(REQUESTS.values()))


@pytest.fixture(scope="module", params=KINDS)
def on(
    request: pytest.FixtureRequest,
    folder: Path,
    expected: dict[str, Reported],
    found_without_drafts: list[
        int
    ],  # only one engine can run at a time, so this fixture's engine must end first
) -> Iterator[Stage]:
    with drafting(request.param, folder, expected) as made:
        yield made


@pytest.fixture
def clean_on(on: Stage) -> Iterator[Stage]:
    on.rig.forget()
    yield on
    on.copier.fails = on.copier.lies = False
    on.copier.lies_in = None
    on.rig.check_clean()


# -- answers ------------------------------------------------------------------------------------------------------------


def test_answers_after_loads_equal_those_without_connector_and_drafts(clean_on: Stage) -> None:
    check_scene(clean_on, reloaded)


def test_wrong_bytes_change_an_answer(clean_on: Stage) -> None:
    clean_on.check_that_lies_are_noticed(reloaded)


@pytest.mark.full
@pytest.mark.parametrize("scene", SCENES[1:], ids=lambda scene: scene.__name__)
def test_answers_equal_those_without_connector_and_drafts(clean_on: Stage, scene: Scene) -> None:
    check_scene(clean_on, scene)


@pytest.mark.full
def test_failed_loads_are_computed_again(clean_on: Stage) -> None:
    before = clean_on.rig.counts
    assert not clean_on.different(failed(clean_on))
    assert clean_on.rig.counts.minus(before).count("kvoffload_load_blocks_total", "failed") > 0


@pytest.mark.full
def test_aborts_and_resets_at_random_steps_change_no_other_answer(clean_on: Stage) -> None:
    """Some resets preempt all running requests, and others reset only what no request uses."""
    on, draw, gone, resets = clean_on, random.Random(4), set[str](), 0

    def disturb(step: int) -> None:
        nonlocal resets
        running = [name for name in REQUESTS if not on.rig.is_done(name)]
        if step % 7 == 3 and running:
            name = draw.choice(running)
            gone.add(name)
            on.rig.abort(name)
        if draw.random() < 0.2:
            # vLLM refuses to reset running requests while a block is copied.
            with suppress(RuntimeError):
                is_hard = draw.random() < 0.5
                on.rig.scheduler.reset_prefix_cache(reset_running_requests=is_hard, reset_connector=True)
                resets += 1

    on.put_on_host()
    on.rig.reported.clear()
    answers = on.rig.run(REQUESTS, disturb)
    kept = {name: answer for name, answer in answers.items() if name not in gone}
    assert gone
    assert resets
    assert kept
    assert not on.different(kept)


# -- hits ---------------------------------------------------------------------------------------------------------------


def test_only_a_heads_hits_are_shorter_than_without_drafts_by_one_block(
    clean_on: Stage, found_without_drafts: list[int], request: pytest.FixtureRequest
) -> None:
    """With a head, vLLM computes the last block of each hit again."""
    found = found_on_host(clean_on)
    lost = [before - now for before, now in zip(found_without_drafts, found, strict=True)]
    assert all(found_without_drafts)
    assert lost == [BLOCK if request.node.callspec.params["on"] == "eagle" else 0] * len(REQUESTS)


# -- acceptance ---------------------------------------------------------------------------------------------------------


def test_as_many_drafts_are_accepted_after_loads_as_after_hits_on_the_device(
    clean_on: Stage, request: pytest.FixtureRequest
) -> None:
    accepted = check_acceptance(clean_on)
    if request.node.callspec.params["on"] == "draft_model":
        assert accepted.rate == 1


@pytest.mark.parametrize("on", ["draft_model", "eagle"], indirect=True)
def test_fewer_drafts_are_accepted_if_loads_leave_out_the_draft_layers(clean_on: Stage) -> None:
    """The tokens do not change, so only the count of accepted drafts notices wrong KV of draft layers."""
    on = clean_on
    on.rig.run(LONG)
    right, _ = serve_alone(on, from_host=True)
    on.copier.lies, on.copier.lies_in = True, draft_regions(on.rig)
    wrong, _ = serve_alone(on, from_host=True)
    assert wrong.rate < right.rate
    on.copier.lies = False
    on.rig.forget()  # removes blocks that were computed from zeros


# -- steps --------------------------------------------------------------------------------------------------------------


def test_only_prompts_count_as_prefill(clean_on: Stage) -> None:
    """Otherwise decoding with drafts would be measured as a slow prefill, and loads would seem to save more time."""
    side = clean_on.rig.side
    with patch.object(side, "step", side_effect=side.step) as step:
        for name, asked in LONG.items():
            clean_on.rig.run({name: asked})
    facts = [call.args[0] for call in step.call_args_list]
    assert sum(fact.prefill_tokens for fact in facts) == sum(len(asked.prompt) for asked in LONG.values())
