"""Engines with other setups: tiny pools, offloading switched off, other connectors, and refused settings."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.errors import ConfigError
from tests.vllm.engine_rig import (
    MARKS,
    SLOT_BYTES,
    Asked,
    Held,
    Reported,
    Reports,
    Rig,
    check_same,
    check_threads_gone,
    offloading,
    same,
    transfer_config,
)
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "checkpoints"


def prompt(seed: int, length: int = 264) -> tuple[int, ...]:
    random_ = random.Random(seed)
    return tuple(random_.randrange(256) for _ in range(length))


def truth(rig: Rig, asked: Mapping[str, Asked]) -> dict[str, Reported]:
    """Return the answers of requests that read no cache, and whose blocks no other request finds."""
    alone = {name: Asked(one.prompt, one.count, "truth", prompt_logprobs=True) for name, one in asked.items()}
    reported = rig.run(alone)
    rig.reported.clear()
    return reported


# -- pools that are too small -------------------------------------------------------------------------------------------


def test_r1_the_host_turns_over_between_lookup_and_allocation(folder: Path) -> None:
    """A request waits for device blocks, while a running one displaces all blocks on the host that are not pinned."""
    with offloading("qwen3", folder, 12, long_prefill_token_threshold=64) as rig:
        asked = {"big": Asked(prompt(1, 930), 40), "small": Asked(prompt(2))}
        expected = truth(rig, asked)
        rig.forget()
        rig.put_on_host_only(asked["small"].prompt)
        for name, one in asked.items():
            rig.ask(name, one)
        before = rig.counts
        with without_blocks_for(rig, "small"):
            rig.until(lambda: rig.is_done("big"))
        gained = rig.counts.minus(before)
        assert gained.count("kvoffload_pin_dropped_blocks_total", "looked_up_again") > 300
        assert gained.count("kvoffload_store_blocks_total", "host_full") > 0
        assert rig.slots(SlotState.PINNED) == 8
        rig.finish()
        check_same({name: rig.reported[name] for name in asked}, expected)
        gained = rig.counts.minus(before)
        assert gained.count("kvoffload_load_blocks_total", "loaded") == 8
        assert gained.total("kvoffload_contract_violations_total") == 0
        rig.check_clean()


def without_blocks_for(rig: Rig, name: str) -> Any:
    """Let vLLM find no room for one request."""
    manager, waiting = rig.scheduler.kv_cache_manager, rig.request(name)
    allocate = manager.allocate_slots

    def maybe(request: Any, *args: Any, **fields: Any) -> Any:
        return None if request is waiting else allocate(request, *args, **fields)

    return patch.object(manager, "allocate_slots", side_effect=maybe)


# -- offloading goes off ------------------------------------------------------------------------------------------------


def test_r12_the_engine_goes_on_without_it(folder: Path) -> None:
    """A handler raises in an allocation while another request is loading. Both are computed, and all later requests."""
    held = Held()
    with offloading("gemma3", folder, held=held) as rig:
        asked = {name: Asked(prompt(number), 10) for number, name in enumerate("abcd")}
        expected = truth(rig, asked)
        rig.forget()
        rig.put_on_host_only(*(one.prompt for one in asked.values()))
        held.copier.hold()
        rig.ask("a", asked["a"])
        rig.until(lambda: held.loads)
        rig.ask("c", asked["c"])
        rig.step()
        (first, second) = held.loads
        rig.ask("b", asked["b"])
        with Reports(rig) as reports:
            with patch.object(rig.side.core.state.leases, "take", side_effect=ZeroDivisionError):
                rig.step()
            assert rig.side.core.state.degraded is not None
            assert held.loads == [first, second]
            rig.until(lambda: len(reports.failed) == 3)
            first.finish()  # The copy is too late to be trusted, and its blocks were not allocated to others.
            second.tear()
            rig.ask("d", asked["d"])
            held.copier.release()
            rig.finish()
        assert sorted(reports.received) == sorted(reports.failed) == ["a", "b", "c"]
        check_same({name: rig.reported[name] for name in asked}, expected)
        assert rig.reported["d"].cached == 0
        assert not rig.scheduler.connector.has_pending_push_work()
        assert engines.held_blocks(rig.llm) == 0
        assert not rig.scheduler.requests
        assert not any(rig.side.gauges()["kvoffload_open_jobs"].values())


# -- beside another connector -------------------------------------------------------------------------------------------


def fill_shelf(rig: Rig, shelf: Any, asked: Asked) -> None:
    """Put a prompt's blocks from the device on the shelf."""
    core, regions = rig.side.core.state, rig.pump._arena.layout.regions
    rig.ask("shelf", asked)
    for block_hash in rig.request("shelf").block_hashes:
        block = core.device.block_of(block_hash + bytes(4))
        if block is not None:
            shelf.content[block_hash] = [
                ctypes.string_at(region.address + block * region.block_stride, region.page_bytes)
                for region in regions
            ]
    rig.abort("shelf")


@pytest.mark.parametrize("order", [("Shelf", "ours"), ("ours", "Shelf")], ids=" ".join)
def test_beside_another_connector(order: Sequence[str], folder: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from tests.vllm.shelf_connector import Shelf as shelf

    shelf.content.clear()
    shelf.reported.clear()
    shelf.loaded = 0
    parts = {"Shelf": {"kv_connector": "Shelf", "kv_role": "kv_both"}, "ours": transfer_config(256)}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [parts[name] for name in order]},
    }
    with (
        patch.dict(KVConnectorFactory._registry, {"Shelf": lambda: shelf}),
        offloading("qwen3", folder, kv_transfer_config=both) as rig,
    ):
        asked = {name: Asked(prompt(number), 10) for number, name in enumerate("ab")}
        expected = truth(rig, asked)

        rig.run({"warm": Asked(asked["a"].prompt, 1)})
        fill_shelf(rig, shelf, asked["a"])
        rig.finish()
        rig.forget()
        # Only the other connector has it. Ours gets real blocks with no tokens, and stores what the other has loaded.
        check_same(rig.run({"a": asked["a"]}), expected)
        assert shelf.loaded == 8
        assert rig.counts.total("kvoffload_contract_violations_total") == 0
        assert rig.slots(SlotState.READY) >= 8

        # Only our connector has it.
        shelf.content.clear()
        assert rig.scheduler.reset_prefix_cache()
        before = rig.counts
        reported = rig.run({"a": asked["a"]})
        check_same(reported, expected)
        assert reported["a"].cached == 256
        assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") == 8
        assert shelf.reported[-1][1] == 0

        # Both have it, and the first one loads.
        fill_shelf(rig, shelf, asked["a"])
        rig.finish()
        assert rig.scheduler.reset_prefix_cache()
        before, shelf.loaded = rig.counts, 0
        check_same(rig.run({"a": asked["a"]}), expected)
        ours = rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded")
        assert (shelf.loaded, ours) == ((8, 0) if order[0] == "Shelf" else (0, 8))
        check_same(rig.run({"b": asked["b"]}), expected)
        rig.check_clean()


# -- vLLM's own metrics and events --------------------------------------------------------------------------------------


def sample(name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    from prometheus_client import REGISTRY

    return sum(
        one.value
        for family in REGISTRY.collect()
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    )


def test_metrics_and_events_of_vllm(folder: Path) -> None:
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

            # A load that fails is computed instead.
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

        # If this fails, vLLM has removed its limit, and plugins/kvoffload_vllm/README.md need not describe the
        # workaround.
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
        assert rig.scheduler.connector.get_kv_connector_stats() is None, "nothing has changed"
        rig.check_clean()


# -- refusals -----------------------------------------------------------------------------------------------------------


def refused(folder: Path, **options: Any) -> str:
    """Start an engine that must not start; return its error."""
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as error, engines.in_process(folder / "qwen3", **options):
        pass
    check_threads_gone()
    left = [one for one in set(threading.enumerate()) - before if one.name.startswith("kvoffload")]
    assert not left
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    return str(error.value)


def test_everything_wrong_is_listed_at_once(folder: Path) -> None:
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


def test_checksums_are_refused_where_vllm_fails_requests(folder: Path) -> None:
    checkpoints.make("qwen3", folder / "qwen3")
    config = {**transfer_config(64, verify="sample"), "kv_load_failure_policy": "fail"}
    text = refused(folder, kv_transfer_config=config)
    assert "verify is 'sample'" in text
    assert '"kv_load_failure_policy":"recompute" in --kv-transfer-config' in text
