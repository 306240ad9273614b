"""Stats and events with the base classes, the wire format and the registry of the installed vLLM."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.ids import BlockKey
from kvoffload.model.wire import Tier
from kvoffload.telemetry.catalogue import Hook
from tests.telemetry.fake_source import FakeSource
from tests.vllm.adapter.test_translations import attention, cache_config, engine
from tests.vllm.engine_rig import MARKS

pytestmark = MARKS


def test_stats_are_added_to_the_metrics_of_the_front_end() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvoffload.telemetry.payload import Changes
    from kvoffload_vllm.stats import KVOffloadPromMetrics, KVOffloadStats

    offload = FakeSource({"kvoffload_capacity_slots": {("host",): 3}})
    changes = Changes(offload)
    offload.counters.hooks(deque([{Hook.STEP: 2e-6}]))
    offload.counters.add("kvoffload_journal_write_errors_total")
    changed = changes.take()
    assert changed is not None
    stats = KVOffloadStats(changed)
    assert not stats.is_empty()
    assert bool(stats)  # vLLM's aggregation evaluates `stats or None`
    assert changes.take() is None
    reported = getattr(stats, "to_dict", lambda: stats.data)()
    arrived = KVOffloadStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(reported)))
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


def test_events_equal_those_of_vllms_block_pool() -> None:
    """Our events for a full attention group equal the pool's for the same blocks, except for the location."""
    from vllm import SamplingParams
    from vllm.distributed.kv_events import BlockRemoved, KVEventBatch
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvoffload_vllm.events import TierEvents, find_wire
    from kvoffload_vllm.groups import vllm_groups
    from kvoffload_vllm.pool_device import VllmDevice
    from kvoffload_vllm.progress import KeyMaker
    from kvoffload_vllm.support import Features

    init_none_hash(sha256)
    config = cache_config(attention(), attention("SlidingWindowSpec", sliding_window=80))
    groups = vllm_groups(engine(), config, features=Features())
    own: dict[str, Any] = {"cache_salt": "s", "lora_request": LoRARequest("poems", 7, "/poems")}
    own["block_hasher"] = get_request_block_hasher(32, sha256)
    request = Request("a", list(range(70)), SamplingParams(max_tokens=1), None, **own)
    full, window = KeyMaker(groups.hash_ratios, groups.ids).keys(request.block_hashes, 0)
    made = TierEvents(groups, {Tier.HOST: KeyIndex()}, find_wire(config), VllmDevice(), print)
    made.notes.take(request, 0, 70)
    ledger = [(key, True) for key in (full[1], full[0], window[1])] + [(BlockKey(b"gone" + bytes(4)), False)]
    ours = list(made.events(Tier.HOST, ledger))

    pool = BlockPool(4, True, 32, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(2)
    for number in range(2):
        pool.cache_full_blocks(request, blocks, number, number + 1, 32, 0)
    removed, *stored, windowed = ours
    assert isinstance(removed, BlockRemoved)
    for mine, other in zip(stored, pool.take_events(), strict=True):
        assert differing(mine, other) <= {
            "medium",
            "locality",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        }
    assert [one.medium for one in stored] == ["CPU", "CPU"]
    assert differing(windowed, stored[1]) == {
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    }
    kinds = [(one.kv_cache_spec_kind, one.kv_cache_spec_sliding_window) for one in (stored[1], windowed)]
    assert kinds == [("full_attention", None), ("sliding_window", 80)]
    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=ours))
    assert msgspec.msgpack.decode(batch, type=KVEventBatch).events == ours


def differing(one: Any, other: Any) -> set[str]:
    assert type(one) is type(other)
    return {name for name in other.__struct_fields__ if getattr(one, name) != getattr(other, name)}
