"""Tests `vllm serve` with two data-parallel engines and two API servers, before and after a restart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.vllm.serve.serve_rig import (
    BLOCK,
    MARKS,
    ask,
    check_log,
    check_same,
    connector,
    draw,
    until,
)
from tests.vllm.stock import checkpoints, client, engines
from tests.vllm.stock.client import Reply, settled
from tests.vllm.stock.engines import Server

pytestmark = [*MARKS, pytest.mark.full]

PROMPTS = draw(1, 12, 300)
SLOTS = 512


def by_engine(server: Server, name: str, *labels: str) -> list[int]:
    """Return a metric's values, one for each engine."""
    samples = [line.rpartition(" ") for line in server.get("/metrics").splitlines()]
    return [
        int(float(value))
        for series, _, value in samples
        for engine in "01"
        if series.startswith(f"{name}{{")
        and all(f'"{label}"' in series for label in labels)
        and f'engine="{engine}"' in series
    ]


def check_both_grew(server: Server, name: str, *labels: str) -> list[int]:
    counts = by_engine(server, name, *labels)
    assert [count > 0 for count in counts] == [True, True], counts
    return counts


@contextmanager
def serving(folder: Path, life: int) -> Iterator[Server]:
    """Run two engines during the `with` block. Each engine uses its own part of the folder's disk."""
    config = connector(SLOTS)
    config["kv_connector_extra_config"] |= {
        "journal_path": str(folder / f"journal{life}"),
        "disk_path": str(folder / "disk"),
        "disk_bytes": "16MiB",
    }
    with engines.serving(
        checkpoints.make("qwen3", folder / "qwen3"),
        folder / f"log{life}",
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        data_parallel_size=2,
        api_server_count=2,
        num_gpu_blocks_override=40,
        shutdown_timeout=60,
        enable_prompt_tokens_details=True,
        kv_transfer_config=config,
    ) as server:
        yield server
        assert server.stop() == 0
        check_log(server)


def ask_again_and_again(server: Server, expected: Sequence[Reply]) -> int:
    """Send the prompts three times, each time with an empty device cache. Return how many tokens were found."""
    found = 0
    for _ in range(3):
        replies = ask(server, PROMPTS)
        check_same(replies, expected)
        found += sum(reply.cached_tokens for reply in replies)
        settled(server)
        # the reset succeeds only if no block of the device is in use
        assert server.post("/reset_prefix_cache") == {"success": True}
    return found


def test_two_engines_behind_two_api_servers_find_their_blocks_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, 1) as server:
        # with different salts, no prompt finds a block
        expected = ask(server, PROMPTS, salted=True)
        assert not any(reply.cached_tokens for reply in expected)
        found = ask_again_and_again(server, expected)
        loaded = check_both_grew(server, "kvoffload_load_blocks_total", "loaded")
        # either API server may answer, and each reports the counts of both engines
        for _ in range(4):
            metrics = client.scrape(server)
            assert metrics("kvoffload_load_blocks_total", "loaded") == sum(loaded)
            assert metrics("kvoffload_lookup_tokens_total", "hit") == sum(loaded) * BLOCK
            assert by_engine(server, "kvoffload_capacity_slots", "host") == [SLOTS, SLOTS]
            assert metrics("kvoffload_degraded") == metrics("kvoffload_contract_violations_total") == 0
        assert found >= sum(loaded) * BLOCK > 0
        check_both_grew(server, "kvoffload_tier_blocks_total", "disk", "store", "done")
    assert {path.name for path in tmp_path.glob("journal*")} == {"journal1", "journal1.dp1"}
    assert {path.name for path in tmp_path.glob("disk/*/replica*")} == {"replica0", "replica1"}

    with serving(tmp_path, 2) as server:
        ask_until_its_disk_is_read(server, expected)
        assert ask_again_and_again(server, expected) > 0
        check_both_grew(server, "kvoffload_tier_blocks_total", "disk", "load", "done")
        assert server.post("/reset_prefix_cache?reset_external=true") == {"success": True}
        hits = server.metric("vllm:external_prefix_cache_hits_total")
        check_same(ask(server, PROMPTS), expected)
        settled(server)
        assert server.metric("vllm:external_prefix_cache_hits_total") == hits


def ask_until_its_disk_is_read(server: Server, expected: Sequence[Reply]) -> None:
    """Wait until both engines have read their part of the disk.

    An idle engine reports nothing, so each attempt sends prompts that find no block.
    """

    def is_read() -> bool:
        check_same(ask(server, PROMPTS[:4], salted=True), expected[:4])
        slots = by_engine(server, "kvoffload_capacity_slots", "disk")
        return len(slots) == 2 and all(slots)

    until(is_read)
