"""What is believed of a remote store: which blocks it has, as it said or as every rank has written them.

The store has an index of its own, and others write to it and evict from it. So a slot of this pool stands for no place in the store
but for a hint, and the pool bounds how many there are. A fetch that finds nothing forgets the hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.core.disk_state import DiskState
from kvoffload.core.job import Job
from kvoffload.core.machine import SlotState
from kvoffload.model.ids import BlockKey, Rank, RequestId, SlotId
from kvoffload.model.transfer import Tier

MOST_HINTS = 2**17
MOST_ASKED = 4096
"""Keys of one request: Mooncake's master takes some 9 microseconds for each."""


class RemoteState(DiskState):
    """`Spills` and `Fetches` write it, and the facts about the store.

    Args:
        after_hits: a block is written to the store when it was found again so often.
        ranks: none of which has reached the store yet.

    Attributes:
        namespace: under which this engine's blocks are in the store, empty before that is known.
        asks: what the store must be asked: a request and keys.
    """

    def __init__(self, after_hits: int, ranks: Iterable[Rank]) -> None:
        super().__init__(after_hits, Tier.REMOTE)
        self.pool.grow(MOST_HINTS)
        self.failing = set(ranks)
        self.namespace = ""
        self.asks: list[tuple[RequestId, tuple[BlockKey, ...]]] = []

    @property
    def is_usable(self) -> bool:
        """Whether a copy may be begun."""
        return bool(self.namespace) and not (self.is_closed or self.failing or self.abandoned)

    @property
    def has_blocks(self) -> bool:
        """Whether the store is believed to have any block."""
        return bool(self.pool.count(SlotState.READY) or self.pool.count(SlotState.PINNED))

    def note(self, found: Sequence[BlockKey], missing: Sequence[BlockKey]) -> None:
        """Take over what the store says: the first of `found` are kept where there is no room for all."""
        index = self.pool.index
        for key in missing:
            if (place := index.get(key)) is not None:
                self.pool.invalidate(place)
        new = [key for key in dict.fromkeys(found) if key not in index and key not in self.spilling]
        places, _ = self.pool.reserve(new[: self.pool.room])
        self.pool.fill(places[::-1])

    def expected(self, places: Sequence[SlotId]) -> tuple[tuple[int, ...], ...]:
        """Values bring their checksums with them."""
        return ()

    def put(self, job: Job) -> None:
        """The store has its own index."""

    def read(self, places: Sequence[SlotId]) -> None:
        """The store has its own order of eviction."""

    def strike(self, slot: SlotId) -> None:
        """The store has its own index."""

    def forget_all(self) -> int:
        """Nothing of this namespace is to be found any more."""
        self.namespace = ""
        self.asks.clear()
        super().forget_all()
        return 0
