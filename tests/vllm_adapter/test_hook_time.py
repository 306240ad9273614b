"""Time in the scheduler's hooks beside vLLM's own connector: the same engine, workload and machine, in turns step by step.

A gate fails only when every repeat lies above it. Decoding takes at most half of the peer's time. Steps that admit requests,
and with them a workload of short outputs, take longer than the peer's: their gates hold what was reached.
"""

from __future__ import annotations

import pytest

from tests.vllm_adapter.engine_rig import MARKS

pytestmark = MARKS

RUNNING = 128
AT_MOST = {
    ("qwen3", "decode"): 0.5,
    ("gemma3", "decode"): 0.4,
    ("qwen3", "prefill"): 4.5,
    ("gemma3", "prefill"): 3.0,
    ("qwen3", "all"): 1.5,
    ("gemma3", "all"): 1.1,
}
"""By model and kind of step: kvoffload's time a step over the peer's."""


@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_time_in_hooks_beside_the_peer(model: str) -> None:
    from kvoffload_vllm.bench_engines import find_connectors
    from kvoffload_vllm.bench_hooks import measure

    connectors, _ = find_connectors("tests.vllm_stock.peer")
    cases = measure(connectors, [model], [RUNNING], repeats=5, tokens=64)
    ratios = {case.phase: case.ratios() for case in cases}
    assert ratios.keys() == {"decode", "prefill", "all"}
    slow = {phase: found for phase, found in ratios.items() if min(found) > AT_MOST[model, phase]}
    assert not slow, f"above {[AT_MOST[model, phase] for phase in slow]} in every repeat: {slow}"
