"""The core's reports: events in order, sums of block counts, and the reasons why keys are missing on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sized

from kvoffload.model.causes import EvictionCause, MissCause, RejectionCause, StoreOutcome
from kvoffload.model.events import (
    BlocksEvicted,
    BlocksOffered,
    BlocksZeroed,
    Event,
    FactRejected,
    StoreEnded,
    TierBlocksEvicted,
)
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.model.wire import Tier

_PARTS = 64
_LEAST_PART = 64  # `MissMemory` is split into parts only if each part can store this many keys.


class Tally:
    """Collects events and sums of block counts until the runtime takes them.

    Args:
        planned: the jobs of the next plan. Sums are held back while there are any, because the events of these jobs
            must come first.
    """

    def __init__(self, planned: Sized) -> None:
        self._planned = planned
        self.events: list[Event] = []
        """Events about requests and jobs. Every part of the core appends its own events here."""
        self._outcomes: dict[StoreOutcome, int] = {}
        self._evicted: dict[EvictionCause, tuple[int, float]] = {}
        self._offered = self._zeroed = 0
        self.open_offers = 0
        """The number of offers without an outcome."""
        self.has_sums = False
        """Whether anything was counted since the last `take`."""

    def offered(self, blocks: int) -> None:
        self._offered += blocks
        self.open_offers += blocks
        self.has_sums = True

    def count_stores(self, outcome: StoreOutcome, blocks: int = 1) -> None:
        """Count offers whose final outcome is known."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + blocks
        self.open_offers -= blocks
        self.has_sums = True

    def evicted(self, cause: EvictionCause, blocks: int, age_s: float = 0.0) -> None:
        """Count blocks that left the host; `age_s` is the number of seconds since the most recent of their uses."""
        if blocks:
            before, youngest_s = self._evicted.get(cause, (0, age_s))
            self._evicted[cause] = before + blocks, min(youngest_s, age_s)
            self.has_sums = True

    def evicted_below(self, tier: Tier, cause: EvictionCause, blocks: int) -> None:
        """Report blocks that left a lower tier. If the tier manages its blocks itself, only hints were lost."""
        if blocks and tier.has_slots:
            self.events.append(TierBlocksEvicted(tier, blocks, cause))

    def rejected(self, cause: RejectionCause, request: RequestId | None = None) -> None:
        """Report a fact that contradicts earlier facts."""
        self.events.append(FactRejected(cause, request))

    def zeroed(self, blocks: int) -> None:
        """Count zeroed entries of block tables."""
        if blocks:
            self._zeroed += blocks
            self.has_sums = True

    def take(self, *, everything: bool = False) -> list[Event]:
        """Return the events since the last call. Add the sums if no jobs are planned.

        Args:
            everything: add the sums in any case.
        """
        events, self.events = self.events, []
        self.has_sums = False
        if self._planned and not everything:
            return events
        if self._zeroed:
            events.append(BlocksZeroed(self._zeroed))
        if self._evicted:
            for cause, (blocks, age_s) in self._evicted.items():
                events.append(BlocksEvicted(blocks, cause, age_s))
            self._evicted = {}
        if self._offered:
            events.append(BlocksOffered(self._offered))
        if self._outcomes:
            events += [StoreEnded(outcome, blocks) for outcome, blocks in self._outcomes.items() if blocks]
            self._outcomes = {}
        self._offered = self._zeroed = 0
        return events


class MissMemory:
    """Records why keys are not on the host.

    These are the last `bound` keys, roughly, that left the host or did not reach it, and all keys that the last reset
    dropped. A key may be on the host again: once it leaves, a new cause replaces the old one.

    The first byte of a key selects one of several dicts. A single `OrderedDict` with many insertions and deletions
    would be rebuilt now and then, which takes 10 ms for 65,536 keys.
    """

    def __init__(self, bound: int = 65_536) -> None:
        parts = _PARTS if bound >= _PARTS * _LEAST_PART else 1
        self._bound = bound // parts
        self._causes: list[OrderedDict[BlockKey, MissCause]] = [OrderedDict() for _ in range(parts)]
        self._before_reset: Mapping[BlockKey, object] = {}

    def note(self, keys: Iterable[BlockKey], cause: MissCause) -> None:
        """Record why keys are not on the host."""
        causes, parts, bound = self._causes, len(self._causes), self._bound
        for key in keys:
            part = causes[key[0] % parts]
            part[key] = cause
            part.move_to_end(key)
            if len(part) > bound:
                part.popitem(last=False)

    def reset(self, dropped: Mapping[BlockKey, object]) -> None:
        """Forget all causes. The cause of the keys that the reset dropped becomes AFTER_RESET."""
        for part in self._causes:
            part.clear()
        self._before_reset = dropped

    def cause(self, key: BlockKey) -> MissCause:
        """Return why a key that is not on the host is missing there."""
        known = self._causes[key[0] % len(self._causes)].get(key)
        if known is None:
            return MissCause.AFTER_RESET if key in self._before_reset else MissCause.NEVER_SEEN
        return known
