"""What the core reports: events in order, and sums of what happened to single blocks, one event each."""

from __future__ import annotations

from kvoffload.model.causes import EvictionCause, StoreOutcome
from kvoffload.model.events import BlocksEvicted, BlocksOffered, BlocksZeroed, Event, StoreSettled


class Tally:
    """Collects events until the runtime takes them. Counts about single blocks are added up meanwhile."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """Append here what concerns a request or a job."""
        self.open_offers = 0
        """Offers without an outcome."""
        self._settled: dict[StoreOutcome, int] = {}
        self._evicted: dict[EvictionCause, int] = {}
        self._offered = self._zeroed = 0
        self._has_sums = False

    def offered(self, blocks: int) -> None:
        """Blocks were offered to the host."""
        self._offered += blocks
        self.open_offers += blocks
        self._has_sums = True

    def settled(self, outcome: StoreOutcome, blocks: int = 1) -> None:
        """Offers got their final outcome."""
        self._settled[outcome] = self._settled.get(outcome, 0) + blocks
        self.open_offers -= blocks
        self._has_sums = True

    def evicted(self, cause: EvictionCause, blocks: int) -> None:
        """Blocks left the host."""
        if blocks:
            self._evicted[cause] = self._evicted.get(cause, 0) + blocks
            self._has_sums = True

    def zeroed(self, blocks: int) -> None:
        """Positions were zeroed in requests' block tables."""
        if blocks:
            self._zeroed += blocks
            self._has_sums = True

    def take(self) -> list[Event]:
        """Return the events since the last call, sums last, and forget them."""
        events = self.events
        if self._has_sums:
            events += self._take_sums()
        if not events:
            return []  # not the list that the next events are appended to
        self.events = []
        return events

    def _take_sums(self) -> list[Event]:
        sums: list[Event] = [BlocksZeroed(self._zeroed)] if self._zeroed else []
        sums += [BlocksEvicted(blocks, cause) for cause, blocks in self._evicted.items()]
        if self._offered:
            sums.append(BlocksOffered(self._offered))
        sums += [StoreSettled(outcome, blocks) for outcome, blocks in self._settled.items() if blocks]
        self._settled, self._evicted = {}, {}
        self._offered = self._zeroed = 0
        self._has_sums = False
        return sums
