"""What the core reports: events in order, and sums of what happened to single blocks, one event each."""

from __future__ import annotations

from collections.abc import Sized

from kvoffload.model.causes import EvictionCause, StoreOutcome
from kvoffload.model.events import (
    BlocksEvicted,
    BlocksOffered,
    BlocksZeroed,
    DiskBlocksEvicted,
    Event,
    StoreEnded,
)


class Tally:
    """Collects events until the runtime takes them, and adds up the counts of single blocks.

    Args:
        planned: jobs that the step's plan will have. While there are any, sums wait: they follow the jobs they are about.
    """

    def __init__(self, planned: Sized) -> None:
        self._planned = planned
        self.events: list[Event] = []
        """About requests and jobs; who has one to report appends it."""
        self._outcomes: dict[StoreOutcome, int] = {}
        self._evicted: dict[EvictionCause, int] = {}
        self._offered = self._zeroed = 0
        self.open_offers = 0
        """Offers without an outcome."""
        self.has_sums = False
        """Whether `take` has sums to return now."""

    def offered(self, blocks: int) -> None:
        """Blocks were offered to the host."""
        self._offered += blocks
        self.open_offers += blocks
        self.has_sums = True

    def count_stores(self, outcome: StoreOutcome, blocks: int = 1) -> None:
        """Offers got their final outcome."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + blocks
        self.open_offers -= blocks
        self.has_sums = True

    def evicted(self, cause: EvictionCause, blocks: int) -> None:
        """Blocks left the host."""
        if blocks:
            self._evicted[cause] = self._evicted.get(cause, 0) + blocks
            self.has_sums = True

    def evicted_from_disk(self, cause: EvictionCause, blocks: int) -> None:
        """Blocks left the disk."""
        if blocks:
            self.events.append(DiskBlocksEvicted(blocks, cause))

    def zeroed(self, blocks: int) -> None:
        """Positions were zeroed in requests' block tables."""
        if blocks:
            self._zeroed += blocks
            self.has_sums = True

    def take(self, *, everything: bool = False) -> list[Event]:
        """Return the events since the last call, and forget them; sums wait while jobs are planned, but for `everything`."""
        events, self.events = self.events, []
        self.has_sums = False
        if self._planned and not everything:
            return events
        if self._zeroed:
            events.append(BlocksZeroed(self._zeroed))
        if self._evicted:
            events += [BlocksEvicted(blocks, cause) for cause, blocks in self._evicted.items()]
            self._evicted = {}
        if self._offered:
            events.append(BlocksOffered(self._offered))
        if self._outcomes:
            events += [StoreEnded(outcome, blocks) for outcome, blocks in self._outcomes.items() if blocks]
            self._outcomes = {}
        self._offered = self._zeroed = 0
        return events
