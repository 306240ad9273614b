"""The limits that clients set for one request, beside the scheduler of vLLM's OffloadingConnector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.ids import BlockKey, Rank
from kvoffload.model.wire import TransferReport
from kvoffload_vllm.pool_device import group_suffix
from tests.vllm.adapter.stand_ins import group
from tests.vllm.engine_rig import MARKS
from tests.vllm.scheduler_rig import BLOCK, BLOCKS, adapter, make_request, step_output, table

pytestmark = MARKS

MOST = 12  # blocks of a prompt
UNIT = BLOCK // 4
"""The tokens of a hash, where blocks have several."""
VALUES = st.sampled_from([None, True, -1, 1.5, "64", [8]]) | st.integers(0, MOST * BLOCK)


def peers_answer(request: Any, device_tokens: int, held: Sequence[set[int]], windows: Sequence[int]) -> int:
    """Return how many tokens vLLM's own scheduler would load, if its tier holds these positions of each group."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as peer
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

    specs = [full_spec(), *map(window_spec, windows)]
    configs = tuple(
        peer.GroupOffloadConfig(
            number, BLOCK, BLOCK, 1, None, peer.get_sliding_window_size_in_chunks(spec, BLOCK), spec, None
        )
        for number, spec in enumerate(specs)
    )
    status = peer.RequestOffloadState(
        peer.SchedulerOffloadConfig(configs, 1, BLOCK, 1, False, False),
        request,
        ReqContext(request.request_id, request.kv_transfer_params),
        peer.RequestOffloadingContext(),
    )
    status.update_offload_keys()
    status.num_locally_computed_tokens = device_tokens
    keys = {
        make_offload_key(request.block_hashes[position], group)
        for group, positions in enumerate(held)
        for position in positions
    }
    scheduler = peer.OffloadingConnectorScheduler.__new__(peer.OffloadingConnectorScheduler)
    scheduler.config = status.config
    scheduler._lookup_groups = tuple(range(len(specs)))
    scheduler._sliding_window_groups = tuple(range(1, len(specs)))
    scheduler._mamba_align_size = None
    scheduler._chunks_being_loaded = set()
    scheduler._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)
    scheduler.manager = SimpleNamespace(
        lookup=lambda key, _: LookupResult.HIT if key in keys else LookupResult.MISS
    )
    return scheduler._lookup_complete_chunks(status)


def peers_answer_with_tails(request: Any, device_tokens: int, held: Sequence[set[int]]) -> int:
    """Return how many tokens vLLM's own scheduler would load, with one attention group and one recurrent group.

    Its tier holds the blocks that end after these numbers of hashes.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as peer
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

    ratio = BLOCK // UNIT
    configs = (
        peer.GroupOffloadConfig(0, BLOCK, BLOCK, ratio, None, None, full_spec(), None),
        peer.GroupOffloadConfig(
            1, BLOCK, BLOCK, ratio, None, 1, state_spec(), None, requires_cow_source=True
        ),
    )
    status = peer.RequestOffloadState(
        peer.SchedulerOffloadConfig(configs, 1, UNIT, 1, False, True),
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
    scheduler._lookup_groups = (0, 1)
    scheduler._sliding_window_groups = (1,)
    scheduler._mamba_align_size = scheduler._partial_tail_block_size = BLOCK
    scheduler._max_eagle_proof_margin, scheduler._eagle_proof_margins = 0, {}
    scheduler._chunks_being_loaded = set()
    ignore = lambda *_: None  # noqa: E731  # two names for one empty method
    scheduler._events_tracker = SimpleNamespace(record_lookup=ignore, record_partial_lookup=ignore)
    scheduler.manager = SimpleNamespace(
        lookup=lambda key, _: LookupResult.HIT if key in keys else LookupResult.MISS
    )
    return scheduler._lookup(status)


def full_spec() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def state_spec() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=BLOCK, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def window_spec(tokens: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=tokens
    )


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
    assert found == peers_answer(request, device_tokens, held, windows)


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
    expected = peers_answer_with_tails(request, device_tokens, there)
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
