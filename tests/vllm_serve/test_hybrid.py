"""`vllm serve` of a model with sliding windows, one worker, with the connector."""

from __future__ import annotations

from pathlib import Path

from tests.vllm_serve.serve_rig import (
    MARKS,
    START_S,
    ask,
    check_log,
    check_nothing_is_left,
    check_same,
    connector,
    draw,
    draw_families,
    settled,
    shared_memory,
)
from tests.vllm_stock import checkpoints, engines

pytestmark = MARKS

DEVICE_BLOCKS = 72
PROMPTS = [*draw_families(5), *draw(6, 4, 500)]
COUNT = 8


def test_answers_are_those_of_an_engine_without_it(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("gemma3", tmp_path / "gemma3")
    with engines.in_process(checkpoint) as plain:
        expected = [engines.generate(plain, [prompt], COUNT)[0] for prompt in PROMPTS]

    with engines.serving(
        checkpoint,
        tmp_path / "log",
        seconds=START_S,
        num_gpu_blocks_override=DEVICE_BLOCKS,
        enable_prompt_tokens_details=True,
        kv_transfer_config=connector(),
    ) as server:
        shared = shared_memory(server)
        rounds = [ask(server, PROMPTS) for _ in range(3)]
        for replies in rounds:
            assert [reply.tokens for reply in replies] == [answer.tokens for answer in expected]
            check_same(replies, rounds[0])
        after = settled(server)
        found = sum(reply.cached_tokens for replies in rounds for reply in replies)
        hits = after("vllm:external_prefix_cache_hits_total")
        assert 0 < hits <= found
        assert after("kvoffload_load_blocks_total", "loaded") == after(
            "kvoffload_load_scheduled_blocks_total"
        )
        assert after("kvoffload_degraded") == after("kvoffload_engine_surprises_total") == 0
        assert not {at for at, value in after.series.items() if at[0].startswith("vllm:") and value < 0}
        assert server.stop() == 0
        check_nothing_is_left(server, shared)
        check_log(server)
