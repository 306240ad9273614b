"""Models with recurrent layers on a stock vLLM: their states go to the host and come back, and nothing changes.

One engine start a model. `recurrent_matrix.py` plays the same scenes with other settings, at greater length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.vllm_adapter.engine_rig import MARKS, Reported
from tests.vllm_adapter.recurrent_rig import (
    BLOCK_TOKENS,
    SCENES,
    SHARED_BLOCKS,
    Stage,
    chunks,
    failed,
    found_one_by_one,
    junctions,
    shared_prefix,
    stage,
)
from tests.vllm_stock import checkpoints

pytestmark = MARKS

SETTINGS: Mapping[checkpoints.Kind, tuple[dict[str, object], dict[str, object]]] = {
    "lfm2": ({}, {}),
    # A part of a block has a hash of its own.
    "granite4": ({}, {"prefix_match_unit": 32}),
    # States at every end of a block.
    "qwen3_next": ({"store_policy": "lazy"}, {"prefix_cache_retention_interval": 64}),
}
"""To each model the connector's settings, and the engine's: each way of vLLM to keep states, once."""


@pytest.fixture(scope="module", params=checkpoints.RECURRENT)
def on(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    extra, options = SETTINGS[request.param]
    folder = tmp_path_factory.getbasetemp() / "checkpoints"
    with stage(request.param, folder, extra=extra, **options) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture(autouse=True)
def clean(on: Stage) -> Iterator[None]:
    on.rig.forget()
    yield
    on.copier.fails = on.copier.zeroes_states = False
    on.rig.check_clean()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_answers_are_those_without_any_cache(
    on: Stage, scene: Callable[[Stage], dict[str, Reported]]
) -> None:
    before = on.rig.counts
    answers = scene(on)
    assert not on.different(answers)
    gained = on.rig.counts.minus(before)
    assert gained.count("kvoffload_state_blocks_total", "store") > 0
    assert gained.count("kvoffload_state_blocks_total", "load") > 0


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_state_of_zeros_is_noticed(on: Stage, scene: Callable[[Stage], dict[str, Reported]]) -> None:
    """Were states not read, or wrong ones as good, the test above would say nothing."""
    on.copier.zeroes_states = True
    answers = scene(on)
    assert on.different(answers)
    on.copier.zeroes_states = False
    on.rig.finish()
    on.rig.forget()  # what was computed from zeros


def test_failed_loads_are_computed_again(on: Stage) -> None:
    before = on.rig.counts
    assert not on.different(failed(on))
    gained = on.rig.counts.minus(before)
    assert gained.count("kvoffload_load_blocks_total", "failed") > 0
    assert gained.count("kvoffload_state_blocks_total", "load") == 0


def test_a_shared_prefix_is_found_from_the_third_request_on(on: Stage) -> None:
    """The device has turned over between any two, so vLLM itself cannot know that the prefix is shared."""
    before, prefix = on.rig.counts, SHARED_BLOCKS * BLOCK_TOKENS[on.kind]
    found = found_one_by_one(on, shared_prefix(on, 6, seed=1))
    keeps_all = "prefix_cache_retention_interval" in SETTINGS[on.kind][1]
    assert found == [0, prefix if keeps_all else 0, *[prefix] * 4]
    gained = on.rig.counts.minus(before)
    asked = 0 if keeps_all else 1
    assert gained.count("kvoffload_junctions_asked_total") == asked
    assert gained.count("kvoffload_junctions_made_total") == asked
    assert gained.count("kvoffload_miss_blocks_total", "no_state") == asked


def test_without_junctions_a_shared_prefix_is_never_found(on: Stage) -> None:
    if "prefix_cache_retention_interval" in SETTINGS[on.kind][1]:
        pytest.skip("it keeps a state at every end of a block")
    with junctions(on, are_on=False):
        assert found_one_by_one(on, shared_prefix(on, 4, seed=2)) == [0] * 4
    assert on.counted("kvoffload_junctions_asked_total") == on.counted("kvoffload_junctions_made_total")


def test_a_junction_costs_one_chunk_once(on: Stage) -> None:
    if "prefix_cache_retention_interval" in SETTINGS[on.kind][1]:
        pytest.skip("it keeps a state at every end of a block")
    costs: dict[bool, list[int]] = {}
    for are_on in (False, True):
        on.rig.forget()
        with junctions(on, are_on=are_on):
            one, two, alone = *shared_prefix(on, 2, seed=3), *shared_prefix(on, 1, seed=4)
            costs[are_on] = []
            for asked in (one, alone, two):
                on.forget_on_device()
                costs[are_on].append(chunks(on, asked))
    first, alone_cost, second = costs[False]
    assert costs[True] in ([first, alone_cost, second], [first, alone_cost, second + 1])
