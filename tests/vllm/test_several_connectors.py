"""Tests a MultiConnector on a stock vLLM, with our connector and vLLM's ExampleConnector, in both orders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.telemetry.counters import Snapshot
from tests.captured_logs import capture_logs
from tests.vllm.adapter.test_doctor import found
from tests.vllm.engine_rig import (
    MARKS,
    Asked,
    Reported,
    Rig,
    check_same,
    offloading,
    plain,
    prompt,
    transfer_config,
)

pytestmark = MARKS

BLOCKS = 8  # how many blocks of a prompt can be found

# ExampleConnector only stores a prompt in the request's first step, so a step must have room for whole
# prompts. And a quarter of the device's blocks, which stores may lease at once, must be all of their blocks: on a busy
# machine, requests would end before their last blocks are stored.
WHOLE_PROMPTS: dict[str, Any] = {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 128}


ASKED = {name: Asked(prompt(seed), 10) for seed, name in enumerate("abc")}
FOUND = BLOCKS * len(ASKED)


@dataclass
class Both:
    """An engine with two connectors.

    Args:
        is_ours_first: whether our connector is the first one.
        shelf: the folder in which the other connector stores blocks.
        outer: the MultiConnector's configuration. Our connector's own configuration has another policy
            for failed loads.
        lines: kvoffload's log lines of the engine's start.
    """

    rig: Rig
    expected: Mapping[str, Reported]
    is_ours_first: bool
    shelf: Path
    outer: dict[str, Any]
    lines: list[dict[str, Any]]

    def run(self) -> Snapshot:
        assert self.rig.scheduler.reset_prefix_cache()
        before = self.rig.counts
        check_same(self.rig.run(ASKED), self.expected)
        self.rig.check_clean()
        return self.rig.counts.minus(before)

    def empty_shelf(self) -> None:
        shutil.rmtree(self.shelf)
        self.shelf.mkdir()

    def stored_by_other(self) -> int:
        return len(list(self.shelf.iterdir()))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Mapping[str, Reported]:
    with plain("qwen3", folder, enable_prefix_caching=False) as rig:
        return rig.run(ASKED)


@pytest.fixture(scope="module", params=[True, False], ids=["ours first", "ours second"])
def both(
    request: pytest.FixtureRequest,
    folder: Path,
    expected: Mapping[str, Reported],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Both]:
    shelf = tmp_path_factory.mktemp("shelf")
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shelf)},
    }
    policies = ("recompute", "fail") if request.param else ("fail", "recompute")
    ours = {**transfer_config(256), "kv_load_failure_policy": policies[1]}
    outer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policies[0],
        "kv_connector_extra_config": {"connectors": [ours, other] if request.param else [other, ours]},
    }
    with (
        capture_logs() as lines,
        offloading("qwen3", folder, kv_transfer_config=outer, **WHOLE_PROMPTS) as rig,
    ):
        yield Both(rig, expected, request.param, shelf, outer, list(lines))


def test_both_connectors_store_and_the_first_one_loads(both: Both) -> None:
    both.rig.forget()
    both.empty_shelf()
    cold = both.run()
    assert cold.count("kvoffload_lookup_blocks_total", "hit") == 0
    assert cold.count("kvoffload_store_blocks_total", "stored") == FOUND
    assert both.stored_by_other() == len(ASKED)

    timed = both.rig.counts.samples("kvoffload_first_token_seconds", "host")
    gained = both.run()
    ours = FOUND if both.is_ours_first else 0
    assert gained.count("kvoffload_load_blocks_total", "loaded") == ours
    assert gained.count("kvoffload_lookup_blocks_total", "hit") == ours
    assert gained.count("kvoffload_lookup_tokens_total", "hit") == ours * 32
    timed = both.rig.counts.samples("kvoffload_first_token_seconds", "host") - timed
    assert timed == (len(ASKED) if ours else 0)
    declined = 0 if both.is_ours_first else len(ASKED)
    assert gained.count("kvoffload_miss_blocks_total", "not_accepted") == declined
    assert gained.count("kvoffload_pin_dropped_blocks_total", "not_accepted") == FOUND - ours
    assert gained.total("kvoffload_contract_violations_total") == 0
    assert all(reported.cached == BLOCKS * 32 for reported in both.rig.reported.values())


def test_blocks_that_only_our_connector_has_are_loaded_by_it(both: Both) -> None:
    both.rig.forget()
    both.run()
    both.empty_shelf()
    gained = both.run()
    assert gained.count("kvoffload_load_blocks_total", "loaded") == FOUND
    assert gained.count("kvoffload_lookup_blocks_total", "hit") == FOUND
    assert gained.total("kvoffload_contract_violations_total") == 0


def test_blocks_that_the_other_connector_loaded_are_stored_by_ours(both: Both) -> None:
    both.rig.forget()
    both.empty_shelf()
    both.run()
    assert both.rig.connector.reset_cache()
    gained = both.run()
    assert gained.count("kvoffload_lookup_blocks_total", "hit") == 0
    assert gained.total("kvoffload_contract_violations_total") == 0
    assert all(reported.cached == BLOCKS * 32 for reported in both.rig.reported.values())
    assert both.rig.slots(SlotState.READY) >= FOUND
    both.empty_shelf()
    assert both.run().count("kvoffload_load_blocks_total", "loaded") == FOUND


def test_the_start_and_the_doctor_read_the_policy_that_vllm_uses(
    both: Both, capsys: pytest.CaptureFixture[str]
) -> None:
    recomputes = both.outer["kv_load_failure_policy"] == "recompute"
    assert both.rig.scheduler.recompute_kv_load_failures == recomputes
    doctor = found(capsys, both.outer)["load failures"]
    assert doctor["verdict"] == ("ok" if recomputes else "error")
    warned = [one for one in both.lines if one["event"] == "doctor_warning"]
    about = [(one["finding"], one["remedy"]) for one in warned if one["check"] == "load failures"]
    assert about == ([] if recomputes else [(doctor["finding"], doctor["remedy"])])
