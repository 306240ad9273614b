"""Tests the connector on a vLLM that passes a scheduler context instead of its block pool, as a change proposes that is
still open. A stand-in makes the stock vLLM do so; all else is stock.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.engine_rig import MARKS, PUBLISHING
from tests.vllm.scenes import SCENES, Scene, Stage, failed, stage

pytestmark = MARKS


@pytest.fixture(scope="module")
def on(folder: Path) -> Iterator[Stage]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvoffload_vllm.scheduler import VllmScheduler

    def pass_context(self: Any, kv_cache_manager: Any) -> None:
        self.bind_scheduler_context(SimpleNamespace(gpu_block_pool=kv_cache_manager.block_pool))

    with pytest.MonkeyPatch.context() as patched:
        for holder in (KVConnectorBase_V1, VllmScheduler):
            patched.delattr(holder, "bind_gpu_block_pool")
        patched.delattr(VllmScheduler, "bind_kv_cache_manager")
        patched.setattr(KVConnectorBase_V1, "bind_kv_cache_manager", pass_context)
        with stage("qwen3", folder, **PUBLISHING) as made:
            yield made


@pytest.mark.parametrize("scene", [*SCENES, failed], ids=lambda scene: scene.__name__)
def test_answers_equal_those_without_any_cache(on: Stage, scene: Scene) -> None:
    on.rig.forget()
    before = on.rig.counts
    assert not on.different(scene(on))
    gained = on.rig.counts.minus(before)
    assert gained.count("kvoffload_store_blocks_total", "stored") > 0
    assert gained.count("kvoffload_load_blocks_total", "failed" if scene is failed else "loaded") > 0
    on.copier.fails = False
    on.rig.check_clean()
