"""Tests LFM2, a model with recurrent layers, with eager stores on every version that hands states to
connectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.vllm.engine_rig import MARKS, Reported
from tests.vllm.recurrent_rig import (
    BLOCK_TOKENS,
    SCENES,
    SHARED_BLOCKS,
    Stage,
    failed,
    found_one_by_one,
    shared_prefix,
    stage,
)
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    if is_refused("lfm2"):
        # Another test in this folder checks the refusal, with another model of several groups.
        pytest.skip("refused at start")
    with stage("lfm2", tmp_path_factory.getbasetemp() / "checkpoints") as made:
        yield made


@pytest.mark.parametrize("scene", [*SCENES, failed], ids=lambda scene: scene.__name__)
def test_states(on: Stage, scene: Callable[[Stage], dict[str, Reported]]) -> None:
    on.rig.forget()
    assert not on.different(scene(on))
    on.rig.check_clean()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_states_control(on: Stage, scene: Callable[[Stage], dict[str, Reported]]) -> None:
    on.rig.forget()
    on.copier.zeroes_states = True
    assert on.different(scene(on))
    on.copier.zeroes_states = False
    on.rig.finish()


def test_states_of_a_shared_prefix(on: Stage) -> None:
    on.rig.forget()
    prefix = SHARED_BLOCKS * BLOCK_TOKENS["lfm2"]
    assert found_one_by_one(on, shared_prefix(on, 4, seed=1)) == [0, 0, prefix, prefix]
    on.rig.check_clean()
