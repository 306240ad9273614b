"""Tests models with recurrent layers on a stock vLLM: states are stored and loaded, and the answers stay the
same.

One engine starts per model. `recurrent_matrix.py` runs the same scenes longer and with more settings.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.core.planners import LazyPlanner
from tests.vllm.engine_rig import MARKS, PUBLISHING, Asked, same, truth
from tests.vllm.scenes import (
    BLOCK_TOKENS,
    SCENES,
    SHARED_BLOCKS,
    Scene,
    Stage,
    failed,
    found_one_by_one,
    reloaded,
    shared_prefix,
    stage,
)
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS

OPTIONS: Mapping[checkpoints.Kind, dict[str, Any]] = {
    "lfm2": {},
    "granite4": {"prefix_match_unit": 32},  # parts of a block have their own hashes
    "qwen3_next": {"prefix_cache_retention_interval": 64},  # vLLM keeps the state at each block's end
}
"""Each of the three ways in which vLLM keeps states is used by one model."""


MODELS = checkpoints.RECURRENT[:1] if engines.IS_V2_RUNNER else checkpoints.RECURRENT
"""Where kernels are interpreted, only one model runs, because recurrent layers are slow on a CPU."""

SPARSE = [kind for kind in MODELS if "prefix_cache_retention_interval" not in OPTIONS[kind]]
"""The models for which vLLM does not keep the state at each block's end."""


@pytest.fixture(scope="module", params=MODELS)
def on(request: pytest.FixtureRequest, folder: Path) -> Iterator[Stage]:
    with stage(request.param, folder, **PUBLISHING, **OPTIONS[request.param]) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(on: Stage) -> Iterator[None]:
    on.rig.forget()
    yield
    on.copier.fails = on.copier.lies = False
    on.rig.check_clean()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_answers_equal_those_without_any_cache(on: Stage, scene: Scene) -> None:
    before = on.rig.counts
    answers = scene(on)
    assert not on.different(answers)
    gained = on.rig.counts.minus(before)
    assert gained.count("kvoffload_state_blocks_total", "store") > 0
    assert gained.count("kvoffload_state_blocks_total", "load") > 0


def test_a_state_of_zeros_is_noticed(on: Stage) -> None:
    on.check_that_lies_are_noticed(reloaded)


def test_the_comparison_detects_a_state_stored_before_its_forward_pass(on: Stage) -> None:
    """Before the forward pass, the block already has its key, but not its bytes."""
    from kvoffload_vllm.worker import VllmWorker

    bind = VllmWorker.bind

    def bind_and_store(worker: VllmWorker, metadata: Any) -> None:
        bind(worker, metadata)
        worker.wait_for_save()

    with patch.object(VllmWorker, "bind", bind_and_store):
        on.put_on_host()
    assert on.different(on.rig.run(on.requests))
    on.rig.finish()
    on.rig.forget()


def test_failed_loads_are_computed_again(on: Stage) -> None:
    before = on.rig.counts
    assert not on.different(failed(on))
    gained = on.rig.counts.minus(before)
    assert gained.count("kvoffload_load_blocks_total", "failed") > 0


def test_a_shared_prefix_is_found_from_the_third_request_on(on: Stage) -> None:
    """The device's cache is empty before each request, so vLLM itself does not notice the shared prefix."""
    before, prefix = on.rig.counts, SHARED_BLOCKS * BLOCK_TOKENS[on.kind]
    found = found_one_by_one(on, shared_prefix(on, 6, seed=1))
    keeps_all = "prefix_cache_retention_interval" in OPTIONS[on.kind]
    assert found == [0, prefix if keeps_all else 0, *[prefix] * 4]
    gained = on.rig.counts.minus(before)
    asked = 0 if keeps_all else 1
    assert gained.count("kvoffload_prefix_boundaries_asked_total") == asked
    assert gained.count("kvoffload_prefix_boundaries_made_total") == asked
    assert gained.count("kvoffload_miss_blocks_total", "no_state") == asked


FINE = [kind for kind in MODELS if "prefix_match_unit" in OPTIONS[kind]]


@pytest.mark.parametrize("on", FINE, indirect=True)
def test_a_hit_ends_at_the_last_state_inside_a_block(on: Stage) -> None:
    """vLLM keeps the state after a prompt's last whole hash, here of 32 tokens in blocks of 64."""
    draw = random.Random(9)
    words = [draw.randrange(256) for _ in range(400)]
    turns = [Asked(tuple(words[:length]), 4) for length in (170, 175, 230, 395)]
    other = Asked((*words[:165], *words[300:350]), 4)
    assert found_one_by_one(on, turns) == [0, 160, 160, 224]
    assert found_one_by_one(on, [other]) == [160]
    answers = {}
    for one in (*turns, other):
        on.forget_on_device()
        answers[one] = on.rig.run({"tail": one})["tail"]
    on.rig.forget()
    assert all(same(answer, truth(on.rig, one)) for one, answer in answers.items())


@contextmanager
def boundaries(on: Stage, *, are_on: bool) -> Iterator[None]:
    state = on.rig.side.core.state
    before, state.policy = state.policy, dataclasses.replace(state.policy, prefix_boundaries=are_on)
    yield
    state.policy = before


@pytest.mark.parametrize("on", SPARSE, indirect=True)
def test_without_boundary_a_shared_prefix_is_never_found(on: Stage) -> None:
    before = on.rig.counts
    with boundaries(on, are_on=False):
        assert found_one_by_one(on, shared_prefix(on, 4, seed=2)) == [0] * 4
    assert on.rig.counts.minus(before).total("kvoffload_prefix_boundaries_asked_total") == 0


@pytest.mark.parametrize("on", SPARSE, indirect=True)
def test_a_boundary_costs_one_chunk_for_a_shared_prefix_and_nothing_otherwise(on: Stage) -> None:
    costs: dict[bool, list[int]] = {}
    for are_on in (False, True):
        on.rig.forget()
        with boundaries(on, are_on=are_on):
            one, two, alone = *shared_prefix(on, 2, seed=3), *shared_prefix(on, 1, seed=4)
            costs[are_on] = []
            for asked in (one, alone, two):
                on.forget_on_device()
                costs[are_on].append(chunks(on, asked))
    first, alone_cost, second = costs[False]
    # If a step's token budget ends at the boundary anyway, the boundary costs no step.
    budget = on.rig.scheduler.scheduler_config.max_num_batched_tokens
    more = int(SHARED_BLOCKS * BLOCK_TOKENS[on.kind] % budget > 0)
    assert costs[True] == [first, alone_cost, second + more]


def chunks(on: Stage, asked: Asked) -> int:
    """Return the number of steps in which the engine computes a request's prompt."""
    sizes: list[int] = []
    schedule = on.rig.scheduler.schedule

    def scheduling(*words: object) -> Any:
        output = schedule(*words)
        sizes.extend(tokens for tokens in output.num_scheduled_tokens.values() if tokens > 1)
        return output

    with patch.object(on.rig.scheduler, "schedule", scheduling):
        on.rig.run({"chunks": asked})
    return len(sizes)


@pytest.mark.parametrize("on", MODELS[:1], indirect=True)  # the other recurrent layers are slow on a CPU
def test_the_lazy_policy_also_stores_states(on: Stage) -> None:
    before, core = on.rig.counts, on.rig.side.core
    eager, core._planner = core._planner, LazyPlanner(core.state, core.stores)
    assert not on.different(reloaded(on))
    prefix = SHARED_BLOCKS * BLOCK_TOKENS[on.kind]
    assert found_one_by_one(on, shared_prefix(on, 4, seed=15)) == [0, 0, prefix, prefix]
    on.rig.finish()
    core._planner = eager
    gained = on.rig.counts.minus(before)
    assert gained.count("kvoffload_state_blocks_total", "store") > 0


def test_events_name_the_kind_of_each_group(on: Stage) -> None:
    """Without the kind, a router could mistake a state for a block of attention."""
    from vllm.v1.kv_cache_interface import MambaSpec

    with on.rig.published() as batches:
        on.put_on_host()
    stored = [event for batch in batches for event in batch.events if type(event).__name__ == "BlockStored"]
    specs = [group.kv_cache_spec for group in on.rig.scheduler.kv_cache_config.kv_cache_groups]
    kinds = {
        (number, "mamba" if isinstance(spec, MambaSpec) else "full_attention")
        for number, spec in enumerate(specs)
    }
    for medium in ("CPU", "GPU"):
        found = {(event.group_idx, event.kv_cache_spec_kind) for event in stored if event.medium == medium}
        assert found == kinds
