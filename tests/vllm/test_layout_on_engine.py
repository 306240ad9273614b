"""Checks on a running engine that blocks are where the layout says, and contain what the engine computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.adapter.test_layout import page
from tests.vllm.engine_rig import MARKS, Asked, offloading
from tests.vllm.stock import checkpoints, engines
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS


@pytest.mark.parametrize(("kind", "groups"), [("qwen3", 1), ("gemma3", 3)])
def test_blocks_are_where_the_layout_says(kind: checkpoints.Kind, groups: int, folder: Path) -> None:
    if is_refused(kind):
        pytest.skip("refused at start")
    with offloading(kind, folder, num_gpu_blocks_override=128) as rig:
        layout = rig.pump._arena.layout
        owners = [region.owner for region in layout.regions]
        storages = {storage.data_ptr(): storage for storage in (owner.untyped_storage() for owner in owners)}
        assert layout.slot_bytes * 128 == sum(storage.nbytes() for storage in storages.values())

        layers = rig.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        assert all(name in layout.meaning for name in layers)
        assert all(layer.get_attn_backend().get_name() in layout.meaning for layer in layers.values())

        empty = {block: page(layout, block) for block in range(128)}
        rig.run({"a": Asked(tuple(range(100)), 4)})
        written = {block for block, before in empty.items() if page(layout, block) != before}
        pool = rig.scheduler.kv_cache_manager.block_pool
        cached = {block.block_id for block in pool.blocks if block.block_hash is not None}
        assert len(cached) == 3 * groups
        assert cached <= written
        # One more block per group was written, with the answer's tokens.
        assert len(written - {0}) <= 4 * groups
        for block in cached:
            assert all(any(part) for part in parts(layout, block))

        shape = rig.side.shape
        kinds = [group.kind.value for group in shape.groups]
        assert sorted(kinds) == ["full", *["sliding_window"] * (groups - 1)]
        windows = {group.reach_tokens for group in shape.groups if group.reach_tokens}
        assert windows == ({checkpoints.WINDOW} if groups > 1 else set())
        assert shape.alignment == engines.BLOCK
        assert (shape.ranks, shape.device_blocks, shape.step_tokens) == (1, 127, 128)


def parts(layout: Any, block: int) -> list[bytes]:
    whole, found = page(layout, block), []
    for region in layout.regions:
        found.append(whole[: region.page_bytes])
        whole = whole[region.page_bytes :]
    return found
