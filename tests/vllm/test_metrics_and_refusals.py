"""Tests the metrics and events of offloading in a stock vLLM, and settings with which vLLM must not start."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.model.errors import ConfigError
from tests.vllm.engine_rig import (
    MARKS,
    SLOT_BYTES,
    Asked,
    Held,
    Reported,
    Rig,
    check_threads_gone,
    offloading,
    prompt,
    same,
    transfer_config,
)
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS


def truth(rig: Rig, asked: Mapping[str, Asked]) -> dict[str, Reported]:
    """Return the answers of requests that read no cache. Their salt makes sure that no other request uses
    their blocks.
    """
    alone = {name: Asked(one.prompt, one.count, "truth", prompt_logprobs=True) for name, one in asked.items()}
    reported = rig.run(alone)
    rig.reported.clear()
    return reported


# -- vLLM's own metrics and events --------------------------------------------------------------------------------------


def sample(name: str, **labels: str) -> float:
    """Return the sum of the metric's samples that have these labels."""
    from prometheus_client import REGISTRY

    return sum(
        one.value
        for family in REGISTRY.collect()
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    )


def test_vllm_publishes_our_metrics_and_events(folder: Path) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    held = Held()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with offloading("qwen3", folder, 20, held=held, disable_log_stats=False, kv_events_config=events) as rig:
        published: list[Any] = []
        publisher = rig.scheduler.kv_event_publisher
        with patch.object(publisher, "publish", side_effect=lambda batch: published.extend(batch.events)):
            asked = Asked(prompt(1), 4)
            expected = truth(rig, {"a": asked})["a"]
            rig.forget()
            published.clear()
            rig.put_on_host_only(asked.prompt)
            stored = [one for one in published if isinstance(one, BlockStored) and one.medium == "CPU"]
            assert len(stored) == 8
            rig.ask("probe", asked)
            hashes = list(map(maybe_convert_block_hash, rig.request("probe").block_hashes))
            rig.abort("probe")
            by_hash = {one.block_hashes[0]: one for one in stored}
            before = sample("vllm:prompt_tokens_cached_by_source_total", source="host")
            for number, block_hash in enumerate(hashes):
                one = by_hash[block_hash]
                assert one.token_ids == list(asked.prompt[number * 32 : number * 32 + 32])
                assert one.parent_block_hash == (hashes[number - 1] if number else None)
                assert (one.block_size, one.group_idx) == (32, 0)

            assert same(rig.run({"a": asked})["a"], expected)
            assert sample("vllm:prompt_tokens_cached_by_source_total", source="host") - before == 256
            assert sample("vllm:external_prefix_cache_hits_total") == 256
            assert sample("vllm:external_prefix_cache_queries_total") > 256

            # Let a load fail. The engine then computes its blocks.
            assert rig.scheduler.reset_prefix_cache()
            held.copier.hold()
            rig.ask("f", asked)
            rig.until(lambda: held.loads)
            held.loads[0].fail()
            held.copier.release()
            rig.finish()
            assert same(rig.reported["f"], expected)

            published.clear()
            rig.run({f"r{number}": Asked(prompt(10 + number), 2) for number in range(4)})
            removed = [one for one in published if isinstance(one, BlockRemoved) and one.medium == "CPU"]
            assert sum(len(one.block_hashes) for one in removed) > 0
            on_host = [one.medium == "CPU" for one in published if isinstance(one, BlockStored)]
            assert any(on_host)
            assert not all(on_host)

        # If this check fails, vLLM has removed its limit: remove the workaround from
        # plugins/kvoffload_vllm/README.md.
        names = {one.name for one in rig.llm.get_metrics()}
        assert "vllm:external_prefix_cache_hits" in names
        assert not [name for name in names if "kvoffload" in name]

        labels = {"engine": "0"}
        counts = rig.counts
        for name, series in counts.counts.items():
            assert sample(name, **labels) == sum(series.values()), name
        assert sample("kvoffload_load_blocks_total", outcome="failed") == 8
        assert sample("kvoffload_capacity_slots", tier="host") == 20
        assert sample("kvoffload_slots", tier="host") == 20
        assert sample("kvoffload_hook_seconds_count", hook="step") > 0
        from prometheus_client import REGISTRY

        negative = [
            one
            for family in REGISTRY.collect()
            for one in family.samples
            if one.value < 0 and "_created" not in one.name
        ]
        assert negative == []
        rig.check_clean()


# -- refusals -----------------------------------------------------------------------------------------------------------


def refused(folder: Path, **options: Any) -> str:
    """Try to start an engine that must be refused; return the error."""
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as error, engines.in_process(folder / "qwen3", **options):
        pass
    check_threads_gone()
    left = [one for one in set(threading.enumerate()) - before if one.name.startswith("kvoffload")]
    assert not left
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    return str(error.value)


def test_all_problems_of_the_settings_are_listed_together(folder: Path) -> None:
    checkpoints.make("qwen3", folder / "qwen3")
    wrong = transfer_config(64, store_polcy="lazy", min_load_tokens=-1)
    text = refused(
        folder, kv_transfer_config={**wrong, "kv_role": "kv_producer"}, enable_prefix_caching=False
    )
    for part in ("store_policy", "min_load_tokens is -1", "'kv_producer'", "prefix caching is off"):
        assert part in text


def test_a_host_below_one_block_is_refused(folder: Path) -> None:
    checkpoints.make("qwen3", folder / "qwen3")
    config = transfer_config(1)
    config["kv_connector_extra_config"]["host_bytes"] = SLOT_BYTES - 1
    assert "host_bytes" in refused(folder, kv_transfer_config=config)


def test_checksums_are_refused_if_vllm_fails_requests_after_failed_loads(folder: Path) -> None:
    checkpoints.make("qwen3", folder / "qwen3")
    config = {**transfer_config(64, verify="sample"), "kv_load_failure_policy": "fail"}
    text = refused(folder, kv_transfer_config=config)
    assert "verify is 'sample'" in text
    assert '"kv_load_failure_policy":"recompute" in --kv-transfer-config' in text
