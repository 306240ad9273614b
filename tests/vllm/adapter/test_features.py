"""Tests what the adapter asks of a vLLM, with stand-ins for the modules of several versions."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.errors import EngineContractError
from kvoffload_vllm.pool_device import find_pool
from kvoffload_vllm.support import (
    FAILURE_HOOKS,
    NEEDED,
    POOL_HOOKS,
    features_of,
    find_problems,
    find_retention,
)
from tests.vllm.adapter.stand_ins import cache_config, full, group, vllm_config

BY_REQUEST, BY_BLOCK = FAILURE_HOOKS


def base(*hooks: str, results: tuple[str, ...] = ("finished_recving", "failed_recving")) -> Any:
    """Return a module with a base class for connectors that has these hooks, and a class for the results of transfers."""
    connector = type("KVConnectorBase_V1", (), dict.fromkeys((*NEEDED, *hooks)))
    fields: list[Any] = [(name, set, field(default_factory=set)) for name in results]
    return SimpleNamespace(
        KVConnectorBase_V1=connector, KVConnectorTransferResults=make_dataclass("Results", fields)
    )


NOTHING: Any = SimpleNamespace()
"""A module without any feature."""


@pytest.mark.parametrize("hook", POOL_HOOKS)
@pytest.mark.parametrize(("failures", "by_request"), [(BY_REQUEST, True), (BY_BLOCK, False)])
def test_one_hook_for_the_pool_and_one_for_failed_loads_are_enough(
    hook: str, failures: str, by_request: bool
) -> None:
    features = features_of(base(hook, failures), NOTHING, NOTHING)
    assert features.lacks == ()
    assert features.reports_failed_loads is by_request


@pytest.mark.parametrize(
    ("module", "lacks"),
    [
        (base(BY_REQUEST), "bind_gpu_block_pool or bind_kv_cache_manager or bind_scheduler_context"),
        (base(POOL_HOOKS[0]), "get_transfer_results or get_block_ids_with_load_errors"),
        (
            base(POOL_HOOKS[0], *FAILURE_HOOKS, results=("finished_recving",)),
            "KVConnectorTransferResults.failed_recving",
        ),
    ],
)
def test_a_vllm_without_any_of_the_alternatives_is_refused_with_one_message(module: Any, lacks: str) -> None:
    (problem,) = find_problems(
        vllm_config(), cache_config(group(full())), features_of(module, NOTHING, NOTHING)
    )
    assert problem.startswith(f"this vLLM lacks {lacks}; the connector works with vLLM 0.28 and newer")


METHODS = ("blocks", "free_block_queue", "free_blocks", "get_cached_block", "get_num_free_blocks", "touch")


@pytest.mark.parametrize("name", ["block_pool", "gpu_block_pool"])
def test_the_pool_is_found_in_a_cache_manager_and_in_a_scheduler_context(name: str) -> None:
    pool = SimpleNamespace(**dict.fromkeys(METHODS))
    assert find_pool(SimpleNamespace(**{name: pool})) is pool


@pytest.mark.parametrize(
    ("holder", "what"),
    [
        # The context of another change that was proposed for vLLM has methods of its own, and no pool.
        (
            SimpleNamespace(get_block=None, touch=None, free_blocks=None, iter_free_blocks=None),
            "no block pool",
        ),
        (
            SimpleNamespace(block_pool=SimpleNamespace(**dict.fromkeys(METHODS[:3]))),
            "a block pool without get_cached_block, get_num_free_blocks, touch",
        ),
    ],
)
def test_a_context_without_a_usable_pool_is_refused_with_one_message(holder: Any, what: str) -> None:
    with pytest.raises(EngineContractError, match=rf"a SimpleNamespace with {what}, looked for as gpu_block"):
        find_pool(holder)


@pytest.mark.parametrize("interval", [0, 64, None])
def test_the_retention_interval_comes_from_the_first_configuration_that_has_it(interval: int | None) -> None:
    has, lacks = SimpleNamespace(prefix_cache_retention_interval=interval), SimpleNamespace()
    assert find_retention(has, SimpleNamespace(prefix_cache_retention_interval=5)) == interval
    assert find_retention(lacks, has) == interval
    assert find_retention(lacks, lacks) == "unknown"


@pytest.mark.parametrize("tells", [True, False])
def test_context_parallelism_needs_a_vllm_that_tells_the_tokens_of_a_block(tells: bool) -> None:
    utils: Any = SimpleNamespace(**({"resolve_dcp_kv_block_size": None} if tells else {}))
    features = features_of(base(POOL_HOOKS[0], BY_REQUEST), NOTHING, utils)
    config = vllm_config(decode_context_parallel_size=2)
    problems = find_problems(config, cache_config(group(full())), features)
    assert len(problems) == (not tells)
    assert all("use vLLM 0.29 or newer, or set it to 1" in one for one in problems)
