"""The metric for the limit on stores shows the lowest limit among the ranks' last reports."""

from __future__ import annotations

import pytest

from kvoffload.model.ids import Rank
from kvoffload.model.wire import TransferReport
from tests.runtime.parts import Side


@pytest.mark.parametrize(
    ("reports", "least"),
    [
        ([], 1.0),
        ([(0, 0.5)], 0.5),
        ([(2, 0.5)], 1.0),
        ([(0, 0.5), (1, 1.0)], 0.5),
        ([(0, 0.5), (1, 0.25), (1, 1.0)], 0.5),
        ([(0, 0.5), (1, 0.25), (1, 0.25), (0, 1.0)], 0.25),
    ],
)
def test_it_is_the_least_of_what_the_ranks_last_reported(
    reports: list[tuple[int, float]], least: float
) -> None:
    side = Side(ranks=2)
    for rank, share in reports:
        side.side.reported([TransferReport(Rank(rank), (), 8, share)])
    assert side.side.gauges()["kvoffload_store_bound_ratio"] == {(): least}
