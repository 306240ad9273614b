"""Tests the setting `layout` with vLLM's backends, and the copied bytes in every layout of vLLM.

vLLM 0.29 and newer have six orders of layers, blocks, heads and tokens. vLLM's CPU attention supports one of
them, and our replacement supports two; the engines here run with both. A backend that does not support the
setting must refuse it. Bytes are compared in all six orders.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import ConfigError
from kvoffload.model.ids import RequestId
from kvoffload.model.wire import Direction, TransferPlan, TransferReport
from tests.copy_jobs import device_job
from tests.vllm.engine_rig import (
    MARKS,
    Asked,
    check_same,
    check_threads_gone,
    offloading,
    plain,
)
from tests.vllm.stock import checkpoints, engines

pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is not None
        and importlib.util.find_spec("vllm.v1.kv_cache_layout") is None,
        reason="before 0.29 vLLM has no layouts to choose from",
    ),
]

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
BLOCKS = 64  # vLLM requires enough blocks for one request of the maximum length
STORED, LOADED = (3, 1, 8), (5, 6, 2)
PATIENCE_S = 60.0


def prompts() -> dict[str, Asked]:
    stem = tuple(range(7, 7 + 96))
    return {f"r{number}": Asked((*stem, *range(number, number + 60))) for number in range(4)}


# -- the setting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "pieces"), [("qwen3", 2), ("gemma3", 2)])
def test_a_backend_that_does_not_support_the_layout_is_refused(
    kind: checkpoints.Kind, pieces: int, folder: Path
) -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    with (
        pytest.raises(ConfigError, match=rf"layout is 'blocks', but the engine keeps .* in {pieces} pieces"),
        offloading(kind, folder, extra={"layout": "blocks"}),
    ):
        pass
    ensure_kv_transfer_shutdown()  # otherwise the next engine would use the connector of the refused worker
    check_threads_gone()


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_an_engine_runs_with_each_layout_that_its_backend_supports(
    kind: checkpoints.Kind, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain(kind, folder, num_gpu_blocks_override=512) as rig:
        expected = rig.run(prompts())
    for name, value in engines.BLOCK_LAYOUTS.items():
        monkeypatch.setenv(name, value)
    for setting, pieces in (("engine", 2), ("blocks", 1)):
        with offloading(kind, folder, extra={"layout": setting}) as rig:
            assert len(rig.pump._arena.layout.regions) == pieces
            rig.put_on_host_only(*(one.prompt for one in prompts().values()))
            before = rig.counts
            check_same(rig.run(prompts()), expected)
            assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0
            rig.check_clean()


# -- the bytes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=checkpoints.KINDS)
def model(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, Any]:
    """Return vLLM's configuration of an engine with the connector, and the cache specs of its layers."""
    with offloading(request.param, folder) as rig:
        runner = rig.core.model_executor.driver_worker.worker.model_runner
        return rig.llm.llm_engine.vllm_config, runner.get_kv_cache_spec()


@pytest.fixture(params=LAYOUTS)
def caches(
    request: pytest.FixtureRequest, model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, dict[str, Any]]:
    """Allocate a KV cache in one of vLLM's layouts. Return both configurations, and each layer's view of the
    cache.
    """
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    vllm_config, specs = model
    monkeypatch.setattr(vllm_config.cache_config, "kv_cache_layout", request.param)
    monkeypatch.setattr(vllm_config.cache_config, "num_gpu_blocks_override", BLOCKS)
    planning = engines.cache_planning()
    groups = planning.get_kv_cache_groups(vllm_config, specs)
    config = planning.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 26)
    config.kv_cache_layout = request.param
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[request.param])
    return vllm_config, config, views


@pytest.fixture
def worker(caches: tuple[Any, Any, dict[str, Any]]) -> Iterator[Any]:
    """Yield the connector's worker side, with this cache registered."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvoffload_vllm.connector import KVOffloadConnector

    vllm_config, config, views = caches
    with set_current_vllm_config(vllm_config):
        connector = KVOffloadConnector(vllm_config, KVConnectorRole.WORKER, config)
    connector.register_kv_caches(views)
    until_reported(connector, lambda report: report.ready_slots >= len(STORED))
    yield connector
    connector.shutdown()
    check_threads_gone()


def copy(connector: Any, direction: Direction, blocks: tuple[int, ...]) -> None:
    """Copy between the first host slots and these blocks in a step of the worker, and check that it succeeds."""
    from kvoffload_vllm.metadata import KVOffloadMetadata

    job = device_job(len(direction.value), direction, range(len(blocks)), blocks, RequestId("r"))
    is_load = direction is Direction.LOAD
    plan = TransferPlan(loads=(job,)) if is_load else TransferPlan(stores=(job,))
    connector.bind_connector_metadata(KVOffloadMetadata(plan))
    connector.start_load_kv(None)
    connector.wait_for_save()
    connector.clear_connector_metadata()
    report = until_reported(connector, lambda report: report.jobs)
    assert [part.outcome for part in report.jobs] == [CopyOutcome.DONE]


def until_reported(connector: Any, condition: Callable[[TransferReport], object]) -> TransferReport:
    """Poll the worker until a report meets the condition; return this report."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline, "it is not reported"
        connector.get_transfer_results(set())
        meta = connector.build_connector_worker_meta()
        for report in meta.reports if meta is not None else ():
            if condition(report):
                return report


def test_every_layer_finds_its_bytes_after_a_load(
    worker: Any, caches: tuple[Any, Any, dict[str, Any]]
) -> None:
    """Store blocks, load them into other blocks, and check every layer's bytes in these blocks.

    If blocks are outermost, a block has one piece. Otherwise it has one piece per layer of a group, or per layer
    and head. No byte of any other block may change.
    """
    import torch

    _, config, views = caches
    layers = max(len(group.layer_names) for group in config.kv_cache_groups)
    heads = next(iter(views.values())).shape[1] if config.kv_cache_layout == "LHBNC" else 1
    pieces = {"L": layers, "B": 1}[config.kv_cache_layout[0]] * heads
    assert len(worker.offload.pump._arena.layout.regions) == pieces

    generator = torch.Generator().manual_seed(0)
    for view in views.values():  # groups share memory, so later values overwrite earlier ones
        view.copy_(torch.randn(view.shape, generator=generator))
    before = {name: view.clone() for name, view in views.items()}
    copy(worker, Direction.STORE, STORED)
    for view in views.values():
        view[list(STORED)] = -1.0
    copy(worker, Direction.LOAD, LOADED)
    others = [block for block in range(config.num_blocks) if block not in {*STORED, *LOADED}]
    for name, view in views.items():
        assert torch.equal(view[list(LOADED)], before[name][list(STORED)]), name
        assert torch.equal(view[others], before[name][others]), name
        assert bool((view[list(STORED)] == -1.0).all()), name
