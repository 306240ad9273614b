"""`verify` on a stock vLLM that fails the request of a failed load, as it does unless told otherwise: a flipped bit costs nobody.

What a lookup found is checked before vLLM is told of it, so no load fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.core.machine import SlotState
from tests.vllm_adapter.engine_rig import MARKS, Asked, Reports, Rig, offloading, same, transfer_config
from tests.vllm_adapter.test_verify_on_vllm import flip, prompt, ready_slots, truth

pytestmark = MARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "checkpoints"


@pytest.fixture(scope="module", params=[("qwen3", False), ("qwen3", True), ("gemma3", False)])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rig]:
    kind, two_steps = request.param
    config = {**transfer_config(256, verify="full"), "kv_load_failure_policy": "fail"}
    with offloading(kind, folder, two_steps=two_steps, kv_transfer_config=config) as rig:
        yield rig


@pytest.fixture
def rig(engine: Rig) -> Iterator[Rig]:
    engine.told.clear()
    engine.forget()
    yield engine
    engine.check_clean()


def test_what_has_not_rotted_is_checked_and_loaded(rig: Rig) -> None:
    asked = Asked(prompt(1), 12)
    expected = truth(rig, asked)
    rig.put_on_host_only(asked.prompt)
    before = rig.counts
    told = rig.run({"a": asked})["a"]
    gained = rig.counts.minus(before)
    assert same(told, expected)
    assert told.cached > 0
    assert gained.count("kvoffload_transfers_total", "host", "check", "done") >= 1
    assert gained.count("kvoffload_load_blocks_total", "loaded") > 0


def test_a_flipped_bit_costs_no_request(rig: Rig) -> None:
    asked = Asked(prompt(2), 12)
    expected = truth(rig, asked)
    rig.forget()
    rig.put_on_host_only(asked.prompt)
    before, lost = rig.counts, rig.slots(SlotState.QUARANTINED)
    bad = ready_slots(rig)[-3:]
    for slot in bad:
        flip(rig, slot)
    with Reports(rig) as reports:
        told = rig.run({"a": asked})["a"]
    gained = rig.counts.minus(before)
    assert same(told, expected)
    assert reports.failed == []
    assert gained.count("kvoffload_transfers_total", "host", "check", "corrupt") >= 1
    assert (
        rig.slots(SlotState.QUARANTINED) - lost
        == gained.count("kvoffload_evicted_blocks_total", "host", "corrupt")
        > 0
    )
    for outcome in ("failed", "corrupt", "abandoned"):
        assert gained.count("kvoffload_load_blocks_total", outcome) == 0
    rig.forget()  # also those that no check has read


def test_two_of_one_prefix_and_one_beside_them(rig: Rig) -> None:
    shared, other = Asked(prompt(3), 8), Asked(prompt(4, 100), 8)
    expected = {"a": truth(rig, shared), "c": truth(rig, other)}
    rig.forget()
    rig.put_on_host_only(shared.prompt)
    before = rig.counts
    told = rig.run({"a": shared, "b": shared, "c": other})
    gained = rig.counts.minus(before)
    assert same(told["a"], expected["a"])
    assert same(told["b"], expected["a"])
    assert same(told["c"], expected["c"])
    assert gained.count("kvoffload_transfers_total", "host", "load", "done") == 1
