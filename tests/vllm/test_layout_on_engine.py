"""Checks on a running engine that blocks are where the layout says, and contain what the engine computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.adapter.test_layout import page
from tests.vllm.stock import checkpoints, engines

if TYPE_CHECKING:
    from pathlib import Path

    from kvoffload.transfer.layout import DeviceLayout

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_blocks_are_where_the_layout_says(kind: checkpoints.Kind, tmp_path: Path) -> None:
    from kvoffload_vllm.groups import vllm_groups
    from kvoffload_vllm.layout import layout_of_caches
    from kvoffload_vllm.support import Features

    with engines.in_process(checkpoints.make(kind, tmp_path)) as llm:
        engine: Any = llm.llm_engine
        runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        layers = engine.vllm_config.compilation_config.static_forward_context
        caches = {name: layer.kv_cache for name, layer in layers.items()}
        config = runner.kv_cache_config
        layout = layout_of_caches(caches, config)
        owners: list[Any] = [region.owner for region in layout.regions]
        storages = {owner.data_ptr(): owner for owner in (one.untyped_storage() for one in owners)}
        total = sum(storage.nbytes() for storage in storages.values())
        assert layout.slot_bytes * config.num_blocks == total

        meaning = registered(engine.vllm_config, config, caches).meaning
        assert [name for name in caches if name in meaning] == list(caches)
        assert all(layer.get_attn_backend().get_name() in meaning for layer in layers.values())

        empty = {block: page(layout, block) for block in range(config.num_blocks)}
        engines.generate(llm, [list(range(100))], 4)
        written = {block for block, before in empty.items() if page(layout, block) != before}
        pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
        cached = {block.block_id for block in pool.blocks if block.block_hash is not None}
        groups = {"qwen3": 1, "gemma3": 3}[kind]
        assert len(cached) == 3 * groups
        assert cached <= written
        # One more block per group was written, with the answer's tokens.
        assert len(written - {0}) <= 4 * groups
        for block in cached:
            assert all(any(part) for part in parts(layout, block))

    engine.vllm_config.kv_transfer_config = type("Transfer", (), {"kv_role": "kv_both"})
    shape = vllm_groups(engine.vllm_config, config, features=Features()).shape
    kinds = [group.kind.value for group in shape.groups]
    assert kinds.count("full") == 1
    assert kinds.count("sliding_window") == groups - 1
    windows = {group.reach_tokens for group in shape.groups if group.reach_tokens}
    assert windows == ({checkpoints.WINDOW} if groups > 1 else set())
    assert shape.alignment == engines.BLOCK
    assert (shape.ranks, shape.device_blocks, shape.step_tokens) == (1, 127, 128)


def registered(vllm_config: Any, kv_cache_config: Any, caches: dict[str, Any]) -> DeviceLayout:
    """Return the layout that the connector registers for these caches."""
    from kvoffload_vllm.connector import KVOffloadConnector

    connector = object.__new__(KVOffloadConnector)
    found: list[DeviceLayout] = []
    connector._vllm_config, connector._vllm_cache_config = vllm_config, kv_cache_config
    connector.register = found.append  # type: ignore[assignment, method-assign]
    connector.register_kv_caches(caches)
    return found[0]


def parts(layout: Any, block: int) -> list[bytes]:
    whole, found = page(layout, block), []
    for region in layout.regions:
        found.append(whole[: region.page_bytes])
        whole = whole[region.page_bytes :]
    return found
