"""Tests speculative decoding on every version of vLLM that can draft on a CPU, with either model runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.drafts_rig import (
    KINDS,
    check_acceptance,
    check_scene,
    drafting,
    skip_without_drafts,
    without_connector_and_drafts,
)
from tests.vllm.engine_rig import MARKS, Reported
from tests.vllm.scenes import preempted, reloaded
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Reported]:
    return without_connector_and_drafts(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts(kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if is_refused("qwen3"):
        pytest.skip("refused at start")
    skip_without_drafts(kind)
    with drafting(kind, folder, request.getfixturevalue("expected")) as on:
        for scene in (reloaded, preempted):
            check_scene(on, scene)
        check_acceptance(on)
        on.rig.check_clean()
