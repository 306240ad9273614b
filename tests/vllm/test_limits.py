"""The limits that clients set for one request, beside the scheduler of vLLM's OffloadingConnector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.ids import BlockKey, Rank
from kvoffload.model.wire import TransferReport
from kvoffload_vllm.pool_device import group_suffix
from tests.vllm.adapter.stand_ins import group
from tests.vllm.engine_rig import MARKS
from tests.vllm.scheduler_rig import (
    BLOCK,
    BLOCKS,
    adapter,
    full_spec,
    make_request,
    step_output,
    table,
    window_spec,
)

pytestmark = MARKS

MOST = 12  # blocks of a prompt
UNIT = BLOCK // 4
"""The tokens of a hash, where blocks have several."""
VALUES = st.sampled_from([None, True, -1, 1.5, "64", [8]]) | st.integers(0, MOST * BLOCK)


def peers_answer(
    request: Any, device_tokens: int, held: Sequence[set[int]], specs: Sequence[Any], unit: int = BLOCK
) -> int:
    """Return how many tokens vLLM's own scheduler would load.

    Args:
        request: a request that vLLM's scheduler knows.
        device_tokens: how many of its tokens the device has.
        held: for each group, the blocks in its tier, each by the number of hashes at its end.
        specs: the groups' specs, of which only the first one is of full attention.
        unit: the tokens of a hash.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as peer
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

    ends_inside = unit < BLOCK
    name = "get_sliding_window_size_in_chunks"  # in `config` from vLLM 0.33 on
    window_of = getattr(config, name, None) or getattr(peer, name)
    configs = tuple(
        peer.GroupOffloadConfig(
            number,
            BLOCK,
            BLOCK,
            BLOCK // unit,
            None,
            window_of(spec, BLOCK),
            spec,
            None,
            **({"requires_cow_source": True} if ends_inside and number else {}),
        )
        for number, spec in enumerate(specs)
    )
    status = peer.RequestOffloadState(
        peer.SchedulerOffloadConfig(configs, 1, unit, 1, False, ends_inside),
        request,
        ReqContext(request.request_id, request.kv_transfer_params),
        peer.RequestOffloadingContext(),
    )
    status.update_offload_keys()
    status.num_locally_computed_tokens = device_tokens
    keys = {
        make_offload_key(request.block_hashes[end - 1], group)
        for group, ends in enumerate(held)
        for end in ends
    }
    scheduler = peer.OffloadingConnectorScheduler.__new__(peer.OffloadingConnectorScheduler)
    scheduler.config = status.config
    scheduler._lookup_groups = tuple(range(len(specs)))
    scheduler._sliding_window_groups = tuple(range(1, len(specs)))
    scheduler._mamba_align_size = scheduler._partial_tail_block_size = BLOCK if ends_inside else None
    scheduler._max_eagle_proof_margin, scheduler._eagle_proof_margins = 0, {}
    scheduler._chunks_being_loaded = set()
    scheduler._events_tracker = Mock()
    scheduler.manager = SimpleNamespace(
        lookup=lambda key, _: LookupResult.HIT if key in keys else LookupResult.MISS
    )
    return scheduler._lookup(status) if ends_inside else scheduler._lookup_complete_chunks(status)


def limits_loads() -> bool:
    """Return whether vLLM's own connector knows a limit on loads."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as peer

    return hasattr(peer.RequestOffloadState, "max_load_tokens")


def state_spec() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=BLOCK, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def hold(scheduler: Any, request: Any, held: Sequence[Iterable[int]]) -> None:
    """Put these positions of each group on the host."""
    keys = scheduler._keys.keys(request.block_hashes, 0)
    put(scheduler, [keys[number][at] for number, positions in enumerate(held) for at in sorted(positions)])


def put(scheduler: Any, keys: Sequence[BlockKey]) -> None:
    scheduler.offload.reported([TransferReport(Rank(0), (), BLOCKS)])
    pool = scheduler.offload.core.state.pool
    slots, _ = pool.reserve(keys)
    pool.fill(slots)


@given(
    blocks=st.integers(1, MOST),
    device=st.integers(0, MOST),
    limit=VALUES,
    missing=st.lists(st.tuples(st.integers(0, 1), st.integers(0, MOST)), max_size=2),
    windows=st.sampled_from([(), (BLOCK // 2,), (2 * BLOCK,)]),
)
def test_property_a_limit_on_loads_means_what_it_means_to_vllms_own_connector(
    blocks: int, device: int, limit: object, missing: list[tuple[int, int]], windows: tuple[int, ...]
) -> None:
    if not limits_loads():
        pytest.skip("this vLLM's own connector has no limit on loads")
    request = make_request("r", range(blocks * BLOCK + 5))
    request.kv_transfer_params = {"max_load_tokens": limit}
    device_tokens = min(device, blocks) * BLOCK
    held = [
        {position for position in range(blocks) if (group, position) not in missing}
        for group in range(1 + len(windows))
    ]
    with adapter(BLOCK, windows=windows) as (scheduler, _):
        hold(scheduler, request, held)
        scheduler.on_new_request(request)
        found, _ = scheduler.get_num_new_matched_tokens(request, device_tokens)
    ends = [{position + 1 for position in positions} for positions in held]
    specs = [full_spec(), *map(window_spec, windows)]
    assert found == peers_answer(request, device_tokens, ends, specs)


@given(
    tokens=st.integers(1, 5 * BLOCK),
    device=st.integers(0, 4),
    limit=VALUES,
    held=st.tuples(st.sets(st.integers(1, 20), max_size=20), st.sets(st.integers(1, 20), max_size=20)),
    has_all_blocks=st.booleans(),
)
def test_property_a_hit_that_ends_inside_a_block_is_at_least_that_of_vllms_own_connector(
    tokens: int, device: int, limit: object, held: tuple[set[int], set[int]], has_all_blocks: bool
) -> None:
    """Ours may be longer: a tail needs no state at the block before it, and its attention may be a whole block's."""
    limit = limit if limits_loads() else None
    request = make_request("r", range(tokens), UNIT)
    request.kv_transfer_params = {"max_load_tokens": limit}
    ends = range(1, len(request.block_hashes) + 1)
    wholes = {end for end in ends if end * UNIT % BLOCK == 0}
    there = [held[0] & {*ends} | (wholes if has_all_blocks else set()), held[1] & {*ends}]
    device_tokens = min(device, (tokens - 1) // BLOCK) * BLOCK
    groups = [group(full_spec()), group(state_spec())]
    with adapter(BLOCK, UNIT, groups=groups, min_load_tokens=1) as (scheduler, _):
        assert scheduler.offload.shape.tail_tokens == UNIT
        put(
            scheduler,
            [
                BlockKey(request.block_hashes[end - 1] + group_suffix(number))
                for number, of_group in enumerate(there)
                for end in of_group
            ],
        )
        scheduler.on_new_request(request)
        found, _ = scheduler.get_num_new_matched_tokens(request, device_tokens)
    expected = peers_answer(request, device_tokens, there, [full_spec(), state_spec()], UNIT)
    assert found >= expected
    end = (device_tokens + found) // UNIT
    if found > expected:
        before = {at for at in wholes if device_tokens < at * UNIT <= end * UNIT}
        assert end in there[1]
        assert before <= there[0]
        assert {end, -(-end // 4) * 4} & there[0]
    if isinstance(limit, int) and limit is not True and limit >= 0:
        assert found <= limit


@pytest.mark.parametrize("limit", [None, 0, 1, BLOCK, 3 * BLOCK + 1, -1, "all", True])
def test_a_limit_on_stores_means_what_it_means_to_vllms_own_connector(limit: object) -> None:
    request = make_request("r", range(5 * BLOCK + 5))
    request.kv_transfer_params = {"max_offload_tokens": limit}
    with adapter(BLOCK) as (scheduler, pool):
        hold(scheduler, request, [()])
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        blocks = pool.get_new_blocks(6)
        scheduler.update_state_after_alloc(request, table([block.block_id for block in blocks]), 0)
        scheduler.build_connector_meta(step_output(request, 5 * BLOCK + 5, is_new=True))
        pool.cache_full_blocks(request, blocks, 0, 5, BLOCK, 0)
        request.num_computed_tokens = 5 * BLOCK + 5
        plan = scheduler.build_connector_meta(step_output(request, 1)).plan
    stored = sum(len(job.slots) for job in plan.stores)
    allowed = limit if isinstance(limit, int) and limit is not True and limit >= 0 else 5 * BLOCK
    assert stored == min(allowed // BLOCK, 5)


def test_limits_of_another_form_are_ignored_with_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with adapter(BLOCK) as (scheduler, _):
        for number in range(3):
            request = make_request(f"r{number}", range(40))
            request.kv_transfer_params = {
                "max_load_tokens": "many" * 100,
                "kv_load_tiers": {"medium": "CPU"},
                "remote": 1,
            }
            scheduler.on_new_request(request)
    lines = [line for line in caplog.text.splitlines() if "request_limit_ignored" in line]
    assert [("name=max_load_tokens" in line, "name=kv_load_tiers" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]
    assert max(map(len, lines)) < 600
