"""A store that engines share in simulations: it is queried, written and read, fails, and outlives engines."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulate.scenario import draw
from tests.simulate.simulation import simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(60, 160)
"""the seeds after those of `test_simulate`, with only a store; `test_disk` runs seeds with both tiers"""


@pytest.mark.full
def test_seeds_with_a_store_end_well_and_have_seen_something() -> None:
    total = Counter[str]()
    for seed in SEEDS:
        scenario = draw(seed)
        if scenario.store is not None and scenario.disk is None:
            world = simulate(seed)
            total += world.copies_below + Counter(lives=world.life)
    assert total["lives"] > 20
    for what in ("store done", "store failed", "load done", "load failed"):
        assert total[f"remote {what}"] > 5, total


def test_stores_and_what_happens_to_them_differ() -> None:
    drawn = [scenario for scenario in map(draw, range(300)) if scenario.store is not None]
    troubles = ("error", "torn", "late", "hang", "untrue", "gone", "cut", "flip", "mixed", "full", "lost")
    for trouble in troubles:
        assert any(getattr(scenario.store, trouble) for scenario in drawn), trouble
    acts = {act for one in drawn for act in one.acts}
    assert acts >= {
        "others_write",
        "store_evicts",
        "store_dies",
        "store_returns",
        "store_restarts",
        "store_fills",
    }
    assert {one.disk is None for one in drawn} == {True, False}
