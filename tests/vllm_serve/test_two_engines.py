"""`vllm serve` with two engines (data parallel) and two API servers, through HTTP alone."""

from __future__ import annotations

from pathlib import Path

from tests.vllm_serve.serve_rig import (
    BLOCK,
    MARKS,
    START_S,
    ask,
    check_log,
    check_same,
    connector,
    draw,
    settled,
)
from tests.vllm_stock import checkpoints, client, engines
from tests.vllm_stock.engines import Server

pytestmark = MARKS

PROMPTS = draw(1, 12, 300)
SLOTS = 512


def by_engine(server: Server, name: str, *labels: str) -> list[int]:
    """A metric of each engine."""
    samples = [line.rpartition(" ") for line in server.get("/metrics").splitlines()]
    return [
        int(float(value))
        for series, _, value in samples
        for engine in "01"
        if series.startswith(f"{name}{{")
        and all(f'"{label}"' in series for label in labels)
        and f'engine="{engine}"' in series
    ]


def test_two_engines_behind_two_api_servers(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("qwen3", tmp_path / "qwen3")
    config = connector(SLOTS)
    config["kv_connector_extra_config"]["journal_path"] = str(tmp_path / "journal")
    with engines.serving(
        checkpoint,
        tmp_path / "log",
        seconds=START_S,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        data_parallel_size=2,
        api_server_count=2,
        num_gpu_blocks_override=40,
        shutdown_timeout=60,
        enable_prompt_tokens_details=True,
        kv_transfer_config=config,
    ) as server:
        # Each with a salt of its own: none finds anything.
        expected = ask(server, PROMPTS, salted=True)
        assert not any(reply.cached_tokens for reply in expected)
        assert server.post("/reset_prefix_cache?reset_external=true") == {"success": True}

        found = 0
        for _ in range(3):
            replies = ask(server, PROMPTS)
            check_same(replies, expected)
            found += sum(reply.cached_tokens for reply in replies)
            settled(server)
            # True only where no block of the device is held.
            assert server.post("/reset_prefix_cache") == {"success": True}
        loaded = by_engine(server, "kvoffload_load_blocks_total", "loaded")
        assert len(loaded) == 2
        assert all(loaded)
        # Several API servers add up to what the engines did, whichever of them is asked.
        for _ in range(4):
            metrics = client.scrape(server)
            assert metrics("kvoffload_load_blocks_total", "loaded") == sum(loaded)
            assert metrics("kvoffload_lookup_tokens_total", "hit") == sum(loaded) * BLOCK
            assert by_engine(server, "kvoffload_capacity_slots", "host") == [SLOTS, SLOTS]
            assert metrics("kvoffload_degraded") == metrics("kvoffload_engine_surprises_total") == 0
        assert found >= sum(loaded) * BLOCK > 0
        assert server.stop() == 0
        check_log(server)
    assert {path.name for path in tmp_path.glob("journal*")} == {"journal", "journal.dp1"}
