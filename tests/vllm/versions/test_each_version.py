"""Scenes that must work on every version of vLLM that supports the model: full attention, windows, LFM2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_rig import MARKS, plain
from tests.vllm.scenes import (
    BLOCK_TOKENS,
    SHARED_BLOCKS,
    Scene,
    Stage,
    aborted,
    failed,
    failed_without_copies,
    found_one_by_one,
    preempted,
    reloaded,
    requests_for,
    reset,
    shared_prefix,
    stage,
)
from tests.vllm.stock import checkpoints
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS

SCENES: Sequence[Scene] = (reloaded, preempted, aborted, reset, failed)
SMALL: Mapping[checkpoints.Kind, dict[str, Any]] = {  # fewer blocks than all requests need together
    "qwen3": {"num_gpu_blocks_override": 24, "max_model_len": 384},
    "gemma3": {"num_gpu_blocks_override": 44, "max_model_len": 384},
    "lfm2": {},
}


@pytest.fixture(scope="module", params=SMALL)
def on(request: pytest.FixtureRequest, folder: Path) -> Iterator[Stage]:
    kind = request.param
    if is_refused(kind):
        pytest.skip("refused at start")  # another test in this folder checks the refusal
    asked = requests_for(kind)
    with plain(kind, folder, num_gpu_blocks_override=512) as rig:
        expected = rig.run(asked)
    with stage(kind, folder, asked=asked, expected=expected, **SMALL[kind]) as made:
        yield made


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scene(on: Stage, scene: Scene) -> None:
    before = on.rig.counts
    assert not on.different(scene(on))
    gained = on.rig.counts.minus(before)
    assert gained.count("kvoffload_load_blocks_total", "failed" if scene is failed else "loaded") > 0
    on.rig.check_clean()


def test_tokens_are_right_if_loads_fail_without_copies(on: Stage) -> None:
    assert not on.different(failed_without_copies(on))
    on.rig.check_clean()


@pytest.mark.parametrize("scene", SCENES[:-1], ids=lambda scene: scene.__name__)
def test_control(on: Stage, scene: Scene) -> None:
    on.check_that_lies_are_noticed(scene)


@pytest.mark.parametrize("on", ["lfm2"], indirect=True)
def test_states_of_a_shared_prefix(on: Stage) -> None:
    on.rig.forget()
    prefix = SHARED_BLOCKS * BLOCK_TOKENS["lfm2"]
    assert found_one_by_one(on, shared_prefix(on, 4, seed=1)) == [0, 0, prefix, prefix]
    on.rig.check_clean()
