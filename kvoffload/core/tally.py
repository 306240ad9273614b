"""What the core reports: events in order, sums of what happened to single blocks, and why a key is not on the host."""

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

    def evicted_below(self, tier: Tier, cause: EvictionCause, blocks: int) -> None:
        """Blocks left a lower tier. Of a remote store only hints are lost, which are not counted: the store keeps its blocks."""
        if blocks and tier is Tier.DISK:
            self.events.append(DiskBlocksEvicted(blocks, cause))

    def rejected(self, cause: RejectionCause, request: RequestId | None = None) -> None:
        """A fact or report cannot be true, and is ignored."""
        self.events.append(FactRejected(cause, request))

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


class MissMemory:
    """Remembers about the last `bound` keys that left the host or never reached it, and all that the last reset dropped.

    A large one has parts by the first byte of a key, each of which remembers its share: an `OrderedDict` whose keys
    come and go copies itself now and then, which takes 10 ms for 65,536 keys.
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
        """Forget keys that are on the host now."""
        causes, parts = self._causes, self._parts
        for key in keys if causes else ():
            if (part := causes.get(key[0] % parts)) is not None:
                part.pop(key, None)

    def reset(self, dropped: Mapping[BlockKey, object]) -> None:
        """Remember that all keys known until now are from before the reset."""
        self._causes.clear()
        self._before_reset = dropped

    def cause(self, key: BlockKey) -> MissCause:
        """Return why a key that is not on the host misses. Reads only."""
        part = self._causes.get(key[0] % self._parts)
        if part is not None and (known := part.get(key)) is not None:
            return known
        return MissCause.AFTER_RESET if key in self._before_reset else MissCause.NEVER_SEEN
