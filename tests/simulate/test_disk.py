from __future__ import annotations

from collections import Counter

import pytest

from tests.simulate.scenario import draw
from tests.simulate.simulation import simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(60, 200)
"""these seeds are not among the seeds of `test_simulate`"""


@pytest.mark.full
def test_seeds_with_a_disk_pass_and_cover_every_kind_of_event() -> None:
    total = Counter[str]()
    for seed in SEEDS:
        if draw(seed).disk is not None:
            world = simulate(seed)
            total += world.copies_below + Counter(lives=world.life)
    assert total["lives"] > 40
    for what in ("disk store done", "disk store failed", "disk load done", "restored"):
        assert total[what] >= 3, total
