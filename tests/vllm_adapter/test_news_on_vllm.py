"""Stats and events against the installed vLLM: its base classes, its wire format, its registry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.ids import BlockKey
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.gauges import GaugeSnapshot
from kvoffload.telemetry.labels import Hook
from tests.vllm_adapter.test_on_vllm import attention, cache_config, engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]

# -- metrics --------------------------------------------------------------------------------------------------------


class Offload:
    """Something that counts."""

    def __init__(self) -> None:
        self.counters = Counters()

    def gauges(self) -> GaugeSnapshot:
        return GaugeSnapshot({"ready": 3}, 3)


def through_the_wire(data: Any) -> Any:
    msgspec = pytest.importorskip("msgspec")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(data))


def test_stats_reach_a_front_ends_metrics() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvoffload_vllm.prometheus import KVOffloadPromMetrics
    from kvoffload_vllm.stats import KVOffloadStats, StatsSender

    offload = Offload()
    sender = StatsSender(offload)
    offload.counters.hook(Hook.STEP, 2e-6)
    offload.counters.journal_failed()
    stats = sender.take()
    assert stats is not None
    assert not stats.is_empty()
    assert bool(stats)  # vLLM's aggregation takes `stats or None`
    assert sender.take() is None
    told = getattr(stats, "to_dict", lambda: stats.data)()
    arrived = KVOffloadStats(data=through_the_wire(told))
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

    sent = {"counts": {"kvoffload_lookup_tokens_total": {"hit": 30, "miss": 10}}}
    total = KVOffloadStats()
    assert total.is_empty()
    for _ in range(2):
        total = total.aggregate(KVOffloadStats(data=sent))
    assert total.reduce()["hit_tokens"] == 60
    assert sent["counts"]["kvoffload_lookup_tokens_total"]["hit"] == 30
    total.reset()
    assert total.is_empty()


# -- events ---------------------------------------------------------------------------------------------------------


def test_events_are_vllms_own() -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    from kvoffload_vllm.events import BlockNotes, EventMaker, find_wire
    from kvoffload_vllm.groups import vllm_groups
    from kvoffload_vllm.tracked import KeyMaker

    groups = vllm_groups(engine(), cache_config(attention()))
    request = SimpleNamespace(
        block_hashes=[b"a" * 32, b"b" * 32], all_token_ids=list(range(70)), lora_request=None
    )
    keys = KeyMaker(groups.hash_ratios, groups.ids).keys(request.block_hashes, 0)
    notes = BlockNotes(groups, 10)
    notes.take(request, keys, (0,))
    maker = EventMaker(groups, notes, find_wire())
    removed, stored = maker.events([(keys[0][1], True), (BlockKey(b"gone" + bytes(4)), False)])
    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [maybe_convert_block_hash(b"b" * 32)]
    assert stored.parent_block_hash == maybe_convert_block_hash(b"a" * 32)
    assert stored.token_ids == list(range(32, 64))
    assert (stored.block_size, stored.medium, stored.group_idx) == (32, "CPU", 0)
    msgspec = pytest.importorskip("msgspec")
    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[removed, stored]))
    assert msgspec.msgpack.decode(batch, type=KVEventBatch).events == [removed, stored]
