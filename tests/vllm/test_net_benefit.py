"""Tests the estimates of the time that loading saves and costs on a stock vLLM, with one step or two in
flight.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.vllm.engine_rig import MARKS, Asked, Rig, offloading

pytestmark = MARKS

TOKENS = 960


def asked(count: int = 4) -> dict[str, Asked]:
    draw = random.Random(3)
    return {
        f"p{number}": Asked(tuple(draw.randrange(256) for _ in range(TOKENS)), 8) for number in range(count)
    }


def reload(rig: Rig, requests: dict[str, Asked], times: int) -> None:
    for _ in range(times):
        for name, one in requests.items():
            rig.run({name: one})
            rig.reported.clear()
            assert rig.scheduler.reset_prefix_cache()  # resets only the device's cache


def value(rig: Rig, name: str, *labels: str) -> float:
    return rig.side.gauges()[f"kvoffload_{name}"][labels]


@pytest.mark.parametrize("two_steps", [False, True])
def test_saved_time_is_estimated_from_vllms_prefill_speed(folder: Path, two_steps: bool) -> None:
    with offloading("qwen3", folder, two_steps=two_steps) as rig:
        requests = asked()
        reload(rig, requests, 1)
        rate = value(rig, "prefill_tokens_per_second")
        assert rate > 0
        assert value(rig, "prefill_seconds_saved_total") == 0
        before = rig.counts
        reload(rig, requests, 2)
        loaded = rig.counts.minus(before).count("kvoffload_lookup_tokens_total", "hit")
        assert loaded > TOKENS * len(requests)
        saved = value(rig, "prefill_seconds_saved_total")
        assert 0.2 < saved / (loaded / rate) < 5
        waits = rig.counts.distributions["kvoffload_load_wait_seconds"]["own_load",]
        assert waits.samples == 2 * len(requests)
        assert 0 < waits.total < 60
        assert value(rig, "break_even_tokens") > 0
