"""Tests speculative decoding in further settings: two steps in flight, lazy stores, a small host, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.drafts_rig import (
    DRAFTS,
    check_scene,
    drafting,
    drafts,
    skip_without_drafts,
    without_connector_and_drafts,
)
from tests.vllm.engine_rig import MARKS, Reported, plain
from tests.vllm.scenes import SCENES, requests_for, stage
from tests.vllm.stock import engines

pytestmark = [
    *MARKS,
    pytest.mark.full,
    pytest.mark.skipif(engines.IS_V2_RUNNER, reason="interpreted kernels are slow"),
]

SETTINGS: Mapping[str, dict[str, Any]] = {
    "two steps in flight": {"two_steps": True},
    "lazy stores": {"extra": {"store_policy": "lazy"}},
    "a small host": {"host_blocks": 48},
}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Reported]:
    return without_connector_and_drafts(folder)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_answers_in_other_settings(
    kind: str, settings: str, folder: Path, expected: dict[str, Reported]
) -> None:
    with drafting(kind, folder, expected, **SETTINGS[settings]) as on:
        for scene in SCENES:
            check_scene(on, scene)
            on.rig.check_clean()


def test_answers_of_a_model_with_sliding_windows(folder: Path) -> None:
    skip_without_drafts("ngram")
    asked = requests_for("gemma3")
    with plain("gemma3", folder, num_gpu_blocks_override=512) as rig:
        expected = rig.run(asked)
    # One token is enough to find drafts, because this model's answers run into no cycles.
    ngrams = {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    with stage("gemma3", folder, asked=asked, expected=expected, speculative_config=ngrams) as on:
        assert len(on.rig.side.shape.groups) > 1
        for scene in SCENES:
            before = on.rig.counts
            with drafts(on.rig) as counted:
                assert not on.different(scene(on))
            assert counted.checked > counted.accepted
            assert on.rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0
            on.rig.check_clean()
