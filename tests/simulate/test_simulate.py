"""Checks that seeds pass, can be repeated, and detect disabled rules. `make simulate` runs 10,000 seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from tests.mutants.rules import undone
from tests.simulate.campaign import keep_journal, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEARCH = 150  # a disabled rule must be detected within this many seeds

SHOWN_BY = {
    "r1_load_without_pin": 1,
    "r9_loads_are_not_reported": 1,
    "r14_shared_load_never_ends": 1,
    "r4_torn_copy_counts_as_done": 8,
    "r5_no_lease": 10,
    "r4_one_rank_is_enough": 8,
    "r10_reset_forgets_nothing": 1,
    "r10_store_of_before_reset_arrives": 203,
    "r9_failed_load_counts_as_loaded": 8,
    "r5_overdue_load_frees_its_blocks": 10,
    "r7_stale_ids_stay": 84,
    "r13_load_reported_at_once": 5,
    "r17_disk_is_not_compared": 200,
    "r17_remote_value_is_not_compared": 187,
    "r18_generation_is_not_in_the_name": 21,
    "r18_generation_stays_at_a_reset": 72,
    "r17_dead_store_is_called_on": 37,
    "r4_late_rank_is_ignored": 8,
    "r16_quarantined_slot_comes_back": 53,
    "r10_state_offered_before_the_steps_facts": 13,
    "r13_stores_start_before_the_forward_pass": 13,
}
"""For each disabled rule, a seed that detects it, found by an earlier search."""


@pytest.mark.parametrize("seeds", [60, pytest.param(200, marks=pytest.mark.full)])
def test_the_first_seeds_pass_and_cover_every_kind_of_event(seeds: int) -> None:
    total = Counter[str]()
    for seed in range(seeds):
        result = play(seed)
        assert result.problem is None, f'make simulate ARGS="--seed {seed}"\n{result.trace}'
        total += result.numbers
    assert min(total[what] for what in ("steps", "copies", "stored", "loaded", "requests")) > seeds, total
    # only some seeds have recurrent layers, or a disk or remote tier that outlives an engine
    rare = ["states", "boundaries", "lives", "restored", "disk store done", "disk store failed"]
    assert min(total[what] for what in [*rare, "disk load done", "remote load done"]) > seeds // 20, total
    for tier, way in product(("disk", "remote"), ("store", "load")):
        done, failed = (total[f"{tier} {way} {outcome}"] for outcome in ("done", "failed"))
        assert done > 2 * failed, f"the stand-in of the {tier} does not work"


def test_a_seed_repeats_in_another_process_whose_hashes_differ(tmp_path: Path) -> None:
    here, _ = keep_journal(9, tmp_path / "here")
    subprocess.run(
        [sys.executable, "-m", "tests.simulate", "--seed", "9", "--journals", str(tmp_path / "there")],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
    )
    assert (tmp_path / "there" / here.name).read_text() == here.read_text()


@pytest.mark.full
@pytest.mark.parametrize("rule", SHOWN_BY)
def test_one_of_the_first_seeds_detects_each_disabled_rule(rule: str) -> None:
    with undone(rule):
        assert any(play(seed).problem for seed in (SHOWN_BY[rule], *range(SEARCH)))
