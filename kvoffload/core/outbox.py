"""What the core has to say: events, in order, until the runtime takes them; offers' outcomes are added up first."""

from __future__ import annotations

from kvoffload.model.causes import EvictionCause, StoreOutcome
from kvoffload.model.events import BlocksEvicted, BlocksOffered, BlocksZeroed, Event, StoreSettled


class Outbox:
    """Collects events. Facts about single blocks are added up, so that there is one event and not one per block."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._settled: dict[StoreOutcome, int] = {}
        self._evicted: dict[EvictionCause, int] = {}
        self._offered = 0
        self._zeroed = 0
        self.open_offers = 0  # without an outcome yet

    def put(self, event: Event) -> None:
        """Add one event."""
        self._events.append(event)

    def offered(self, blocks: int) -> None:
        """Blocks were offered to the host."""
        self._offered += blocks
        self.open_offers += blocks

    def settled(self, outcome: StoreOutcome, blocks: int = 1) -> None:
        """Offers got their final outcome."""
        self._settled[outcome] = self._settled.get(outcome, 0) + blocks
        self.open_offers -= blocks

    def evicted(self, cause: EvictionCause, blocks: int) -> None:
        """Blocks left the host."""
        self._evicted[cause] = self._evicted.get(cause, 0) + blocks

    def zeroed(self, blocks: int) -> None:
        """Positions were struck from requests' records."""
        self._zeroed += blocks

    def take(self) -> list[Event]:
        """Hand over what there is, sums last. Empties this."""
        if not (self._events or self._settled or self._evicted or self._offered or self._zeroed):
            return []
        events = self._events
        if self._zeroed:
            events.append(BlocksZeroed(self._zeroed))
        if self._evicted:
            events += [BlocksEvicted(blocks, cause) for cause, blocks in self._evicted.items() if blocks]
        if self._offered:
            events.append(BlocksOffered(self._offered))
        if self._settled:
            events += [StoreSettled(outcome, blocks) for outcome, blocks in self._settled.items() if blocks]
        self._events, self._offered, self._zeroed = [], 0, 0
        self._settled, self._evicted = {}, {}
        return events
