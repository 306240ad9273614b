"""Tests the metrics of offloading in a stock vLLM, and settings with which vLLM must not start."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.errors import ConfigError
from tests.vllm.engine_rig import (
    MARKS,
    SLOT_BYTES,
    Asked,
    Held,
    check_threads_gone,
    offloading,
    prompt,
    same,
    start_loading,
    transfer_config,
    truth,
)
from tests.vllm.stock import checkpoints, engines
from tests.vllm.tiers_rig import KINDS, living

pytestmark = MARKS

_HITS = "vllm:external_prefix_cache_hits_total"
_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"


def counts_by_source() -> bool:
    """Return whether this vLLM counts cached tokens by where they were, 0.32 and newer."""
    return importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is not None


def sample(name: str, **labels: str) -> float:
    """Return the sum of the metric's samples that have these labels."""
    from prometheus_client import REGISTRY

    return sum(
        one.value
        for family in REGISTRY.collect()
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    )


def test_vllm_publishes_our_metrics(folder: Path) -> None:
    from prometheus_client import REGISTRY

    held = Held()
    with offloading("qwen3", folder, 20, held=held, disable_log_stats=False) as rig:
        asked = Asked(prompt(1), 4)
        expected = truth(rig, asked)
        rig.forget()
        rig.put_on_host_only(asked.prompt)
        before = sample(_BY_SOURCE, source="host")
        assert same(rig.run({"a": asked})["a"], expected)
        assert sample(_BY_SOURCE, source="host") - before == (256 if counts_by_source() else 0)
        assert sample("vllm:external_prefix_cache_hits_total") == 256
        assert sample("vllm:external_prefix_cache_queries_total") > 256

        assert rig.scheduler.reset_prefix_cache()
        load = start_loading((rig, held), asked)
        load.fail()
        held.copier.release()
        rig.finish()
        assert same(rig.reported["a"], expected)
        assert sample("kvoffload_load_blocks_total", outcome="failed") == 8

        # If this check fails, vLLM has removed its limit: remove the workaround from
        # plugins/kvoffload_vllm/README.md.
        names = {one.name for one in rig.llm.get_metrics()}
        assert "vllm:external_prefix_cache_hits" in names
        assert not [name for name in names if "kvoffload" in name]

        for name, series in rig.counts.counts.items():
            assert sample(name, engine="0") == sum(series.values()), name
        assert sample("kvoffload_capacity_slots", tier="host") == 20
        assert sample("kvoffload_slots", tier="host") == 20
        assert sample("kvoffload_hook_seconds_count", hook="step") > 0
        samples = [one for family in REGISTRY.collect() for one in family.samples]
        assert [one for one in samples if one.value < 0 and "_created" not in one.name] == []
        rig.check_clean()


@pytest.mark.parametrize(
    ("kind", "below", "source"),
    [
        *[(kind, "disk", "disk") for kind in KINDS],
        ("qwen3", "remote", "external_unspecified"),  # vLLM has no source for a remote tier
    ],
)
def test_vllm_counts_loaded_tokens_by_the_tier_that_had_them(
    kind: checkpoints.Kind, below: str, source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not counts_by_source():
        pytest.skip("this vLLM does not count cached tokens by where they were")
    url = request.getfixturevalue("bucket").url if below == "remote" else None
    with living(kind, tmp_path, url, disable_log_stats=False) as life:

        def counted() -> tuple[dict[str, float], float, float]:
            names = "host", "disk", "p2p", "external_unspecified"
            by_source = {name: sample(_BY_SOURCE, source=name) for name in names}
            return by_source, sample("kvoffload_fetched_tokens_total", tier=below), sample(_HITS)

        for _ in range(2):
            life.ask_without_device()
            life.rig.finish()
        life.push_out()
        before, fetched, hits = counted()
        cached = sum(answer.cached for answer in life.ask().values())
        after, fetched_after, hits_after = counted()
        grown = {name: after[name] - before[name] for name in after}
        assert grown[source] == fetched_after - fetched > 0
        assert sum(grown.values()) == hits_after - hits == cached
        assert {name for name in grown if grown[name]} <= {source, "host"}

        assert life.rig.scheduler.reset_prefix_cache()
        cached = sum(answer.cached for answer in life.ask().values())
        assert counted()[0] == {**after, "host": after["host"] + cached}


@pytest.mark.parametrize(
    ("extra", "fields", "caching", "parts"),
    [
        (
            {"store_polcy": "lazy", "min_load_tokens": -1},
            {"kv_role": "kv_producer"},
            False,
            ["store_policy", "min_load_tokens is -1", "'kv_producer'", "prefix caching is off"],
        ),
        ({"host_bytes": SLOT_BYTES - 1}, {}, True, ["host_bytes"]),
        (
            {"verify": "sample"},
            {"kv_load_failure_policy": "fail"},
            True,
            ["verify is 'sample'", '"kv_load_failure_policy":"recompute" in --kv-transfer-config'],
        ),
    ],
    ids=["all problems together", "a host below one block", "checksums without recomputing"],
)
def test_wrong_settings_are_refused(
    extra: dict[str, Any], fields: dict[str, str], caching: bool, parts: Sequence[str], folder: Path
) -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    checkpoint = checkpoints.make("qwen3", folder / "qwen3")
    config = {**transfer_config(64, **extra), **fields}
    with (
        pytest.raises(ConfigError) as error,
        engines.in_process(checkpoint, kv_transfer_config=config, enable_prefix_caching=caching),
    ):
        pass
    for part in parts:
        assert part in str(error.value)
    check_threads_gone()
    ensure_kv_transfer_shutdown()
