"""How far the ranks hold stores back, as they last told it: a queue of stores that grows has its reason here."""

from __future__ import annotations

from kvoffload.bus.bus import Bus
from kvoffload.model.facts import TransferReported
from kvoffload.model.ids import Rank


class StoreShares:
    """Follows what reports say of the bound on stores in flight."""

    def __init__(self) -> None:
        self._shares: dict[Rank, float] = {}
        self.least = 1.0
        """The share of the rank that holds back most. Written whole, so another thread may read it."""

    def subscribe(self, bus: Bus) -> None:
        """Follow reports from now on."""
        bus.count(TransferReported, self._reported)

    def _reported(self, fact: TransferReported) -> None:
        report = fact.report
        if self._shares.get(report.rank) != report.store_share:
            self._shares[report.rank] = report.store_share
            self.least = min(self._shares.values())
