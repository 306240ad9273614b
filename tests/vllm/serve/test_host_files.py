"""`vllm serve` with host memory in files: killed, and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_rig import SLOT_BYTES
from tests.vllm.serve.serve_rig import BLOCK, MARKS, ask, check_same, connector, draw
from tests.vllm.stock import checkpoints, engines
from tests.vllm.stock.client import settled

pytestmark = MARKS

PROMPTS = draw(7, 6, 500)
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("workers", "sharers"), [pytest.param(1, 1, marks=pytest.mark.full), (2, 1), (2, 2)])
def test_after_a_kill_a_server_finds_what_the_killed_one_had_on_the_host(
    shared_memory: Path, tmp_path: Path, workers: int, sharers: int
) -> None:
    """At least 95 % of the tokens that a server finds whose device cache was emptied.

    With one KV head, two ranks have the same bytes. Sharing a copy, they have room for twice as many blocks.
    """
    shape = {"num_key_value_heads": 1} if sharers == 2 else {}
    checkpoint = checkpoints.make("qwen3", tmp_path / "qwen3", **shape)
    options: dict[str, Any] = {**(engines.TWO_WORKERS if workers == 2 else {}), "num_gpu_blocks_override": 60}
    options["enable_prompt_tokens_details"] = True
    config = connector(host_path=str(shared_memory))
    hits, answers = [], []
    for life in range(2):
        with engines.serving(
            checkpoint, tmp_path / f"{life}.log", kv_transfer_config=config, **options
        ) as server:
            server.complete([1, 2, 3], 8)  # in its steps the KV is identified and the host adopted
            server.complete([1, 2, 3], 8)
            assert server.metric("kvoffload_capacity_slots") == 512 * sharers
            assert server.metric("kvoffload_slot_bytes") == SLOT_BYTES // sharers
            if not life:
                answers = ask(server, PROMPTS)
                settled(server)
                assert server.post("/reset_prefix_cache") == {"success": True}
            before = server.metric(EXTERNAL_HITS)
            # One at a time: the device has no room for all, and a request that vLLM preempts computes what it had found.
            check_same(ask(server, PROMPTS, at_once=1), answers)
            hits.append(server.metric(EXTERNAL_HITS) - before)
            settled(server)
            server.kill()
    assert hits[0] >= len(PROMPTS) * 400 // BLOCK
    assert hits[1] >= 0.95 * hits[0]
