from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.core.machine import SlotState
from tests.vllm.engine_rig import (
    MARKS,
    SLOT_BYTES,
    Asked,
    Reported,
    check_same,
    corrupt_host,
    offloading,
    same,
)

if TYPE_CHECKING:
    import pytest

pytestmark = MARKS

BLOCKS = 8  # the number of whole blocks in a prompt


def draw(count: int) -> dict[str, Asked]:
    random_ = random.Random(1)
    return {
        f"r{number}": Asked(tuple(random_.randrange(256) for _ in range(BLOCKS * 32 + 8)), 12)
        for number in range(count)
    }


def test_blocks_of_8_bit_caches_are_stored_and_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = draw(4)
    # vLLM's CPU platform only accepts fp8 caches if it finds AVX-512. Our torch ops do not need AVX-512.
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    with offloading("qwen3", folder, kv_cache_dtype="fp8") as rig:

        def one_by_one(**fields: Any) -> dict[str, Reported]:
            """Serve one request after the other, so that rounding is the same in every run.

            Concurrent requests round differently, which changes a log-probability by 0.001.
            """
            reported: dict[str, Reported] = {}
            for name, one in asked.items():
                reported |= rig.run({name: Asked(one.prompt, one.count, **fields)})
            return reported

        expected = one_by_one(prompt_logprobs=True)
        rig.forget()
        assert rig.pump._arena.layout.slot_bytes == SLOT_BYTES // 4
        check_same(one_by_one(), expected)
        assert rig.scheduler.reset_prefix_cache()
        reported = one_by_one()
        check_same(reported, expected)
        assert [one.cached for one in reported.values()] == [BLOCKS * 32] * len(asked)
        assert rig.counts.count("kvoffload_load_blocks_total", "loaded") == BLOCKS * len(asked)
        rig.check_clean()

        for position in range(rig.slots(SlotState.READY)):
            corrupt_host(rig, position)
        assert rig.scheduler.reset_prefix_cache()
        reported = one_by_one()
        assert not any(same(reported[name], expected[name]) for name in asked)
        rig.forget()
