"""Bytes of host memory, as the ranks last reported them."""

from __future__ import annotations

from kvoffload.bus.bus import Bus
from kvoffload.disk.system import round_up
from kvoffload.model.facts import TransferReported
from kvoffload.model.ids import Rank


class HostMemory:
    """Follows how much host memory the ranks have made ready. Its numbers are written whole: any thread may read them."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, tuple[int, int, int]] = {}
        self.wanted_bytes = 0
        """What all ranks together will have once they are ready."""
        self.reserved_bytes = 0
        """What they have by now."""
        self.block_bytes = 0
        """One block on all ranks together."""
        self.disk_block_bytes = 0
        """The same in the ranks' slot files."""

    def subscribe(self, bus: Bus) -> None:
        """Follow reports from now on."""
        bus.count(TransferReported, self._reported)

    def _reported(self, fact: TransferReported) -> None:
        report = fact.report
        sizes = report.slot_bytes, report.ready_slots, report.wanted_slots
        if self._ranks.get(report.rank) == sizes:
            return
        self._ranks[report.rank] = sizes
        ranks = self._ranks.values()
        self.wanted_bytes = sum(size * wanted for size, _, wanted in ranks)
        self.reserved_bytes = sum(size * ready for size, ready, _ in ranks)
        self.block_bytes = sum(size for size, _, _ in ranks)
        self.disk_block_bytes = sum(round_up(size) for size, _, _ in ranks)
