"""Tests that SGLang's `/metrics` page contains our metrics. These tests do not need SGLang."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from prometheus_client import REGISTRY

from kvoffload.disk.identity import KVIdentity
from kvoffload.tier_cache import TierCache, tier_config
from kvoffload_sglang.exported import LABELS, Exported

VALUES = ("model", "0", "1", "kv")


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {**dict(zip(LABELS, VALUES, strict=True)), **labels}) or 0.0


def test_metrics_are_exported_once_a_second_and_a_closed_backend_has_no_state(tmp_path: Path) -> None:
    settings = tier_config({"disk_path": str(tmp_path), "disk_bytes": "1MiB"})
    cache = TierCache(lambda: KVIdentity("sglang", "w", "k", {}), [4096], settings)
    assert cache.wait_open(20)
    time = [0.0]
    exported = Exported({VALUES: cache}, lambda: time[0])
    exported.update()
    assert value("kvoffload_tier_state", tier="disk", state="open") == 1

    keys = [sha256(b"%d" % number).digest() for number in range(3)]
    assert all(cache.put(keys, [[memoryview(bytes(4096))]] * 3))
    stored = {"tier": "disk", "direction": "store", "outcome": "done"}
    exported.update()
    assert value("kvoffload_tier_blocks_total", **stored) == 0
    time[0] = 1.0
    exported.update()
    assert value("kvoffload_tier_blocks_total", **stored) == 3
    assert value("kvoffload_transfer_seconds_count", tier="disk", direction="store") > 0
    cache.close()
    exported.close()
    assert value("kvoffload_tier_blocks_total", **stored) == 3
    assert value("kvoffload_tier_state", tier="disk", state="open") == 0
