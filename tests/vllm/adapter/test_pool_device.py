from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model import facts
from kvoffload.model.engine import AuditsLeases
from kvoffload.model.ids import DeviceBlockId, Rank
from kvoffload.model.wire import TransferReport
from kvoffload_vllm.pool_device import VllmDevice
from kvoffload_vllm.support import POOL_HOOKS
from tests.core.audit import audit_side
from tests.vllm.adapter.stand_ins import on_vllm


def test_a_block_with_fewer_references_than_leases_is_reported() -> None:
    device = VllmDevice()
    assert isinstance(device, AuditsLeases)
    leases = {DeviceBlockId(1): 1, DeviceBlockId(2): 2}
    assert device.lease_problems({}) == []  # vLLM has not passed its pool yet
    pool: Any = SimpleNamespace(blocks=[SimpleNamespace(ref_cnt=count) for count in (1, 3, 1)])
    device.bind(pool)
    assert device.lease_problems(leases) == ["block 2 is leased 2 times, vLLM counts 1 references"]
    pool.blocks[2].ref_cnt = 2
    assert device.lease_problems(leases) == []


@on_vllm
def test_leases_are_compared_with_vllms_reference_counts() -> None:
    from tests.vllm.scheduler_rig import adapter

    with adapter(32) as (scheduler, pool):
        device, (block,) = scheduler._device, pool.get_new_blocks(1)
        leases = {DeviceBlockId(block.block_id): 1}
        assert device.lease_problems(leases) == []
        block.ref_cnt -= 1  # as if vLLM had freed a block that we lease
        assert len(device.lease_problems(leases)) == 1


@on_vllm
@pytest.mark.parametrize("hook", POOL_HOOKS)
def test_each_hook_passes_the_pool_to_the_device(hook: str) -> None:
    from vllm.v1.core.block_pool import BlockPool

    from tests.vllm.scheduler_rig import BLOCKS, adapter

    with adapter(32) as (scheduler, before):
        pool = BlockPool(BLOCKS // 2, True, 32)
        given = pool if hook == "bind_gpu_block_pool" else SimpleNamespace(block_pool=pool)
        getattr(scheduler, hook)(given)
        assert before.get_num_free_blocks() != pool.get_num_free_blocks()
        assert scheduler._device.free_blocks() == pool.get_num_free_blocks()


@on_vllm
def test_lazy_stores_only_whole_blocks() -> None:
    """The prompt has two whole blocks of 32 tokens and 24 more tokens, of which vLLM also hashes the first 16."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from tests.vllm.scheduler_rig import BLOCKS, adapter

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    request = Request("a", list(range(88)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    with adapter(32, 16, step_tokens=32, store_policy="lazy") as (scheduler, pool):
        side = scheduler.offload
        side.reported([TransferReport(Rank(0), (), ready_slots=50)])
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(request, blocks, 0, 2, 32, 0)
        assert pool.cache_partial_block(request, blocks[2], 80, 0, 32) is not None
        pool.get_new_blocks(BLOCKS - 3)  # the prompt's blocks are then the next to be evicted
        pool.free_blocks(blocks)
        (job,) = side.step(facts.StepScheduled(0)).stores
        assert set(job.targets) == {block.block_id for block in blocks[:2]}
        assert audit_side(side) == []
