"""More engine setups: caches of 8-bit floats, and vLLM's own ExampleConnector beside ours."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
    transfer_config,
)

pytestmark = MARKS

BLOCKS = 8  # whole blocks of a prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "checkpoints"


def draw(count: int) -> dict[str, Asked]:
    random_ = random.Random(1)
    return {
        f"r{number}": Asked(tuple(random_.randrange(256) for _ in range(BLOCKS * 32 + 8)), 12)
        for number in range(count)
    }


def test_8_bit_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = draw(4)
    # vLLM's CPU platform accepts fp8 caches if it finds AVX-512. The torch conversions that replace its kernels do not
    # need it.
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    with offloading("qwen3", folder, kv_cache_dtype="fp8") as rig:

        def one_by_one(**fields: Any) -> dict[str, Reported]:
            """Serve one request at a time, so that all runs round in the same way.

            Other rounding changes a log-probability by 0.001.
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


@pytest.mark.parametrize("order", [("theirs", "ours"), ("ours", "theirs")], ids=" ".join)
def test_beside_vllms_example_connector(order: Sequence[str], folder: Path, tmp_path: Path) -> None:
    """ExampleConnector does not support several groups, so all layers of this model are one group."""
    stored = tmp_path / "stored"
    parts = {
        "theirs": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(stored)},
        },
        "ours": transfer_config(512),
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [parts[name] for name in order]},
    }
    asked = draw(6)
    # It stores a prompt after its first step, whole or not, so all prompts must fit into one step.
    options: dict[str, Any] = {"kv_transfer_config": both, "max_num_batched_tokens": 4096}
    with offloading("gemma3", folder, **options) as rig:
        scored = {name: Asked(one.prompt, one.count, prompt_logprobs=True) for name, one in asked.items()}
        expected = rig.run(scored)
        rig.forget()

        def ours_loaded() -> int:
            assert rig.scheduler.reset_prefix_cache()
            before = rig.counts
            reported = rig.run(asked)
            check_same(reported, expected)
            assert [one.cached for one in reported.values()] == [BLOCKS * 32] * len(asked)
            return rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded")

        check_same(rig.run(asked), expected)
        # Both connectors have all blocks, and the first one loads.
        assert ours_loaded() == (0 if order[0] == "theirs" else BLOCKS * len(asked))
        shutil.rmtree(stored)
        stored.mkdir()
        assert ours_loaded() == BLOCKS * len(asked)
        rig.side.reset()  # The blocks that the other connector stored again stay.
        assert ours_loaded() == 0
        rig.check_clean()
