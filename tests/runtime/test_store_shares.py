"""How far stores are held back, as an operator sees it: by the last report of the rank that holds back most."""

from __future__ import annotations

import pytest

from kvoffload.bus.bus import Bus
from kvoffload.model.facts import TransferReported
from kvoffload.model.ids import Rank
from kvoffload.model.transfer import TransferReport
from kvoffload.runtime.store_shares import StoreShares
from tests.runtime.parts import Side


@pytest.mark.parametrize(
    ("reports", "least"),
    [
        ([], 1.0),
        ([(0, 0.5)], 0.5),
        ([(0, 0.5), (1, 1.0)], 0.5),
        ([(0, 0.5), (1, 0.25), (1, 1.0)], 0.5),
        ([(0, 0.5), (1, 0.25), (1, 0.25), (0, 1.0)], 0.25),
    ],
)
def test_it_is_the_least_of_what_ranks_last_told(reports: list[tuple[int, float]], least: float) -> None:
    bus, shares = Bus(), StoreShares()
    shares.subscribe(bus)
    for rank, share in reports:
        bus.publish(TransferReported(TransferReport(Rank(rank), (), 8, share)))
    assert shares.least == least


def test_the_schedulers_side_shows_it() -> None:
    side = Side()
    assert side.side.gauges().numbers()["kvoffload_store_bound_ratio"] == {(): 1.0}
    side.side.reported([TransferReport(Rank(0), (), 8, 0.125)])
    assert side.side.gauges().numbers()["kvoffload_store_bound_ratio"] == {(): 0.125}
