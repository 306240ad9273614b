"""Tests stats and events with the base classes, the wire format and the registry of the installed vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.ids import BlockKey
from kvoffload.model.wire import Tier
from kvoffload.telemetry.catalogue import Hook
from tests.telemetry.fake_source import FakeSource
from tests.vllm.adapter.test_translations import attention, cache_config, engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]

# -- metrics --------------------------------------------------------------------------------------------------------


def through_the_wire(data: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(data))


def test_stats_are_added_to_the_metrics_of_the_front_end() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvoffload.telemetry.payload import Changes
    from kvoffload_vllm.stats import KVOffloadPromMetrics, KVOffloadStats

    offload = FakeSource({"kvoffload_capacity_slots": {("host",): 3}})
    changes = Changes(offload)
    offload.counters.hooks({Hook.STEP: 2e-6})
    offload.counters.add("kvoffload_journal_write_errors_total")
    changed = changes.take()
    assert changed is not None
    stats = KVOffloadStats(changed)
    assert not stats.is_empty()
    assert bool(stats)  # vLLM's aggregation evaluates `stats or None`
    assert changes.take() is None
    reported = getattr(stats, "to_dict", lambda: stats.data)()
    arrived = KVOffloadStats(data=through_the_wire(reported))
    assert arrived.data == stats.data

    for _ in range(2):
        metrics = KVOffloadPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
            ["model_name", "engine"],
            {0: ["m", 0]},
        )
    metrics.observe(arrived.data, 0)
    labels = {"model_name": "m", "engine": "0"}
    assert REGISTRY.get_sample_value("kvoffload_journal_write_errors_total", labels) == 1
    assert REGISTRY.get_sample_value("kvoffload_capacity_slots", {**labels, "tier": "host"}) == 3
    assert REGISTRY.get_sample_value("kvoffload_hook_seconds_count", {**labels, "hook": "step"}) == 1


def test_stats_add_up_as_vllm_adds_them() -> None:
    from kvoffload_vllm.stats import KVOffloadStats

    sent = {"kvoffload_lookup_tokens_total": {"hit": 30, "miss": 10}}
    total = KVOffloadStats()
    assert total.is_empty()
    for _ in range(2):
        total = total.aggregate(KVOffloadStats(data=sent))
    assert total.reduce()["hit_tokens"] == 60
    assert sent["kvoffload_lookup_tokens_total"]["hit"] == 30
    total.reset()
    assert total.is_empty()


# -- events ---------------------------------------------------------------------------------------------------------


def published(**fields: Any) -> tuple[list[Any], Any]:
    """Return the events for three stored blocks of a request and one removed block, and the request."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvoffload_vllm.events import TierEvents, find_wire
    from kvoffload_vllm.groups import vllm_groups
    from kvoffload_vllm.pool_device import VllmDevice
    from kvoffload_vllm.progress import KeyMaker
    from kvoffload_vllm.support import Features

    init_none_hash(sha256)
    config = cache_config(attention(), attention("SlidingWindowSpec", sliding_window=80))
    groups, wire = vllm_groups(engine(), config, features=Features()), find_wire(config)
    hasher = get_request_block_hasher(32, sha256)
    request = Request("a", list(range(70)), SamplingParams(max_tokens=1), None, block_hasher=hasher, **fields)
    keys = KeyMaker(groups.hash_ratios, groups.ids).keys(request.block_hashes, 0)
    events = TierEvents(groups, {Tier.HOST: KeyIndex()}, wire, VllmDevice())
    events.notes.take(request, 0, 70)
    ledger = [(key, True) for key in (keys[0][1], keys[0][0], keys[1][1])]
    made = events.events(Tier.HOST, [*ledger, (BlockKey(b"gone" + bytes(4)), False)])
    return list(made), request


def test_events_have_vllms_own_types_and_values() -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    reported, request = published(cache_salt="s")
    removed, first, second, windowed = reported
    assert isinstance(removed, BlockRemoved)
    assert all(isinstance(one, BlockStored) for one in (first, second, windowed))
    hashes = list(map(maybe_convert_block_hash, request.block_hashes))
    assert [one.block_hashes for one in (first, second, windowed)] == [[hashes[0]], [hashes[1]], [hashes[1]]]
    assert [one.parent_block_hash for one in (first, second, windowed)] == [None, hashes[0], hashes[0]]
    assert second.token_ids == windowed.token_ids == list(range(32, 64))
    assert (second.block_size, second.medium) == (32, "CPU")
    assert [one.group_idx for one in (first, second, windowed)] == [0, 0, 1]
    assert [one.kv_cache_spec_kind for one in (second, windowed)] == ["full_attention", "sliding_window"]
    assert [one.kv_cache_spec_sliding_window for one in (second, windowed)] == [None, 80]
    assert [one.extra_keys for one in (first, second)] == [[("s",)], [None]]
    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=reported))
    assert msgspec.msgpack.decode(batch, type=KVEventBatch).events == reported


def test_events_equal_those_of_vllms_block_pool() -> None:
    """Compare our events with those that vLLM's block pool makes for the same blocks. Only the location may
    differ.
    """
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool

    reported, request = published(cache_salt="s", lora_request=LoRARequest("poems", 7, "/poems"))
    pool = BlockPool(4, True, 32, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(2)
    for number in range(2):
        pool.cache_full_blocks(request, blocks, number, number + 1, 32, 0)
    theirs = pool.take_events()
    assert len(theirs) == 2
    placed = ("medium", "locality", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    for mine, other in zip(reported[1:3], theirs, strict=True):
        differing = {name for name in other.__struct_fields__ if getattr(mine, name) != getattr(other, name)}
        assert differing <= set(placed), differing
