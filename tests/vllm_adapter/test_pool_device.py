"""What vLLM's reference counts can tell of our leases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvoffload.model.engine import AuditsLeases
from kvoffload.model.ids import DeviceBlockId
from kvoffload_vllm.pool_device import VllmDevice


def test_a_block_with_fewer_references_than_leases_is_told() -> None:
    device = VllmDevice()
    assert isinstance(device, AuditsLeases)
    leases = {DeviceBlockId(1): 1, DeviceBlockId(2): 2}
    assert device.lease_problems(leases) == []  # vLLM has not handed its pool over yet
    pool: Any = SimpleNamespace(blocks=[SimpleNamespace(ref_cnt=count) for count in (1, 3, 1)])
    device.bind(pool)
    assert device.lease_problems(leases) == ["block 2 is leased 2 times, vLLM counts 1 references"]
    pool.blocks[2].ref_cnt = 2
    assert device.lease_problems(leases) == []
