"""Which blocks a remote store is believed to have: those that it reported, and those that every rank has written.

The store has an index of its own, and others write to it and evict from it. So a slot of this pool stands for a hint, not for a place in
the store, and the pool's size bounds the hints. A fetch that finds nothing forgets the hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.core.tier_state import TierState
from kvoffload.model.ids import BlockKey, Rank, RequestId
from kvoffload.model.transfer import Tier

MOST_HINTS = 2**17
MOST_ASKED = 4096
"""Keys of one request: Mooncake's master takes some 9 microseconds for each."""


class RemoteState(TierState):
    """The remote store. `is_open` once its namespace is known, `is_closed` while it does not answer.

    Args:
        after_hits: as of `TierState`.
        ranks: none of which has reached the store yet.

    Attributes:
        asks: what the store must be asked: a request and keys.
    """

    def __init__(self, after_hits: int, ranks: Iterable[Rank]) -> None:
        super().__init__(Tier.REMOTE, after_hits)
        self.pool.grow(MOST_HINTS)
        self.failing = set(ranks)
        self.asks: list[tuple[RequestId, tuple[BlockKey, ...]]] = []

    def note(self, found: Sequence[BlockKey], missing: Sequence[BlockKey]) -> None:
        """Keep what the store reported; if there is no room for all of `found`, the first of them."""
        index = self.pool.index
        for key in missing:
            if (place := index.get(key)) is not None:
                self.pool.invalidate(place)
        new = [key for key in dict.fromkeys(found) if key not in index and key not in self.spilling]
        places, _ = self.pool.reserve(new[: self.pool.room])
        self.pool.fill(places[::-1])

    def forget_all(self) -> int:
        """Forget all hints and the namespace; return 0, as the store keeps its blocks."""
        self.namespace, self.is_open = "", False  # what is written now has no name yet
        self.asks.clear()
        super().forget_all()
        return 0
