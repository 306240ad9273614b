"""Simulates a disk: blocks are written, read, kept across kills, and every operation can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulate.scenario import draw
from tests.simulate.simulation import simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(60, 200)
"""does not overlap with the seeds of `test_simulate`"""


@pytest.mark.full
def test_seeds_with_a_disk_end_well_and_have_seen_something() -> None:
    total = Counter[str]()
    for seed in SEEDS:
        if draw(seed).disk is not None:
            world = simulate(seed)
            total += world.copies_below + Counter(lives=world.life)
    assert total["lives"] > 40
    for what in ("disk store done", "disk store failed", "disk load done", "restored"):
        assert total[what] >= 3, total
