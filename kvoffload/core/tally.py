"""What the core reports: events in order, sums over single blocks, and why a key is not on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sized

from kvoffload.model.causes import EvictionCause, MissCause, RejectionCause, StoreOutcome
from kvoffload.model.events import (
    BlocksEvicted,
    BlocksOffered,
    BlocksZeroed,
    DiskBlocksEvicted,
    Event,
    FactRejected,
    StoreEnded,
)
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.model.wire import Tier

_PARTS = 64
_LEAST_PART = 64  # keys


class Tally:
    """Collects events until the runtime takes them, and adds up the counts of single blocks.

    Args:
        planned: the jobs of the step's plan. While there are any, sums are kept back: they come after the events of these jobs.
    """

    def __init__(self, planned: Sized) -> None:
        self._planned = planned
        self.events: list[Event] = []
        """About requests and jobs. Every part of the core appends its own."""
        self._outcomes: dict[StoreOutcome, int] = {}
        self._evicted: dict[EvictionCause, int] = {}
        self._offered = self._zeroed = 0
        self.open_offers = 0
        """Offers without an outcome."""
        self.has_sums = False
        """Whether `take` has sums to return now."""

    def offered(self, blocks: int) -> None:
        """Count blocks that were offered to the host."""
        self._offered += blocks
        self.open_offers += blocks
        self.has_sums = True

    def count_stores(self, outcome: StoreOutcome, blocks: int = 1) -> None:
        """Count offers that got their final outcome."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + blocks
        self.open_offers -= blocks
        self.has_sums = True

    def evicted(self, cause: EvictionCause, blocks: int) -> None:
        """Count blocks that left the host."""
        if blocks:
            self._evicted[cause] = self._evicted.get(cause, 0) + blocks
            self.has_sums = True

    def evicted_below(self, tier: Tier, cause: EvictionCause, blocks: int) -> None:
        """Report blocks that left the disk. The remote tier loses only hints, which are not counted: it still has the blocks."""
        if blocks and tier is Tier.DISK:
            self.events.append(DiskBlocksEvicted(blocks, cause))

    def rejected(self, cause: RejectionCause, request: RequestId | None = None) -> None:
        """Report that a fact cannot be true and was ignored."""
        self.events.append(FactRejected(cause, request))

    def zeroed(self, blocks: int) -> None:
        """Count positions that were zeroed in requests' block tables."""
        if blocks:
            self._zeroed += blocks
            self.has_sums = True

    def take(self, *, everything: bool = False) -> list[Event]:
        """Return the events since the last call, and forget them. While jobs are planned, sums come only with `everything`."""
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


class MissMemory:
    """Remembers why keys are not on the host: about `bound` keys that left it or never reached it, and all that a reset dropped.

    The keys are divided by their first byte, because an `OrderedDict` whose keys come and go copies itself now and then,
    which takes 10 ms for 65,536 keys.
    """

    def __init__(self, bound: int = 65_536) -> None:
        self._parts = _PARTS if bound >= _PARTS * _LEAST_PART else 1
        self._bound = bound // self._parts
        self._causes: dict[int, OrderedDict[BlockKey, MissCause]] = {}
        self._before_reset: Mapping[BlockKey, object] = {}

    def note(self, keys: Iterable[BlockKey], cause: MissCause) -> None:
        """Remember why these keys are not on the host."""
        causes, parts, bound = self._causes, self._parts, self._bound
        for key in keys:
            part = causes.get(key[0] % parts)
            if part is None:
                part = causes[key[0] % parts] = OrderedDict()
            part[key] = cause
            part.move_to_end(key)
            if len(part) > bound:
                part.popitem(last=False)

    def arrived(self, keys: Iterable[BlockKey]) -> None:
        """Forget keys that have reached the host."""
        causes, parts = self._causes, self._parts
        for key in keys if causes else ():
            if (part := causes.get(key[0] % parts)) is not None:
                part.pop(key, None)

    def reset(self, dropped: Mapping[BlockKey, object]) -> None:
        """Forget all causes: the keys that were dropped are from before a reset."""
        self._causes.clear()
        self._before_reset = dropped

    def cause(self, key: BlockKey) -> MissCause:
        """Return why a key that is not on the host misses. Reads only."""
        part = self._causes.get(key[0] % self._parts)
        if part is not None and (known := part.get(key)) is not None:
            return known
        return MissCause.AFTER_RESET if key in self._before_reset else MissCause.NEVER_SEEN
