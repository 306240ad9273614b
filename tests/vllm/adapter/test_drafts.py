"""Tests what the adapter makes of draft models, with the specs and requests of the installed vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.vllm.adapter.stand_ins import group
from tests.vllm.engine_rig import MARKS
from tests.vllm.scheduler_rig import (
    BLOCK,
    adapter,
    full_spec,
    make_request,
    step_output,
    table,
    window_spec,
)
from tests.vllm.test_limits import hold

pytestmark = MARKS

BLOCKS = 4
"""The number of whole blocks in a prompt."""


def drafted(spec: Any) -> Any:
    """Return the spec of a draft model's layer."""
    from dataclasses import replace

    if not any(field.name == "is_draft" for field in fields(spec)):
        pytest.skip("needs a vLLM that tags the layers of draft models, 0.33")
    return replace(spec, is_draft=True)


def method(name: str, *, drops: bool) -> Any:
    return SimpleNamespace(method=name, num_speculative_tokens=3, use_eagle_block_drop=lambda: drops)


def found(groups: Sequence[Any], draft: Any, held: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
    """Return how many tokens a request finds on the host, and which groups a load fills.

    Args:
        groups: vLLM's groups.
        draft: the configuration of speculative decoding.
        held: the positions of the blocks that the host has, for each offloaded group.
    """
    request = make_request("r", range(BLOCKS * BLOCK + 5))
    with adapter(BLOCK, groups=groups, draft=draft) as (scheduler, _):
        hold(scheduler, request, held)
        scheduler.on_new_request(request)
        tokens, _ = scheduler.get_num_new_matched_tokens(request, 0)
        return tokens, scheduler.get_loaded_kv_cache_group_ids(request)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize("draft_spec", [full_spec, lambda: window_spec(BLOCK // 2)], ids=["full", "window"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_hit_needs_no_drafts_that_are_made_from_the_current_step(
    name: str, draft_spec: Any, is_first: bool
) -> None:
    draft = group(drafted(draft_spec()))
    groups = [draft, group(full_spec())] if is_first else [group(full_spec()), draft]
    tokens, loaded = found(groups, method(name, drops=False), [range(BLOCKS)])
    assert tokens == BLOCKS * BLOCK
    assert loaded == ((1,) if is_first else (0,))


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_a_hit_needs_the_drafts_of_earlier_steps_and_one_block_after_it(name: str) -> None:
    groups = [group(full_spec()), group(drafted(window_spec(BLOCK // 2)), is_eagle_group=True)]
    draft = method(name, drops=True)
    tokens, loaded = found(groups, draft, [range(BLOCKS), range(BLOCKS)])
    assert (tokens, loaded) == ((BLOCKS - 1) * BLOCK, (0, 1))
    assert found(groups, draft, [range(BLOCKS), ()])[0] == 0


def test_a_group_with_layers_of_both_models_is_needed() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    layers = {"target": full_spec(), "draft": drafted(full_spec())}
    both = group(UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers))
    assert found([both], method("dflash", drops=False), [range(BLOCKS)]) == (BLOCKS * BLOCK, (0,))


def test_groups_without_a_tag_are_needed() -> None:
    groups = [group(full_spec()), group(window_spec(BLOCK // 2))]
    draft = method("dflash", drops=False)
    assert found(groups, draft, [range(BLOCKS), range(BLOCKS)]) == (BLOCKS * BLOCK, (0, 1))
    assert found(groups, draft, [range(BLOCKS), ()])[0] == 0


def test_no_block_is_dropped_if_no_group_has_a_tag_of_a_vllm_that_tags() -> None:
    """Then the draft model has no KV of its own. An older vLLM does not tag, and drops a block of every group."""
    groups = [group(full_spec()), group(window_spec(BLOCK // 2))]
    tags = any(field.name == "is_draft" for field in fields(full_spec()))
    tokens, _ = found(groups, method("mtp", drops=True), [range(BLOCKS), range(BLOCKS)])
    assert tokens == (BLOCKS if tags else BLOCKS - 1) * BLOCK


@pytest.mark.parametrize(
    ("tokens", "drafts", "counted"), [(1, 0, (0, 1)), (40, 0, (40, 0)), (4, 3, (0, 1)), (40, 3, (40, 0))]
)
def test_a_request_that_computes_one_token_and_drafts_decodes(
    tokens: int, drafts: int, counted: tuple[int, int]
) -> None:
    request = make_request("r", range(BLOCKS * BLOCK))
    with adapter(BLOCK) as (scheduler, _):
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, table(range(1, BLOCKS + 2)), 0)
        with patch.object(type(scheduler.offload), "step", side_effect=scheduler.offload.step) as step:
            scheduler.build_connector_meta(step_output(request, tokens, is_new=True, drafts=drafts))
    ((fact,), _) = step.call_args
    assert (fact.prefill_tokens, fact.decode_tokens) == counted
