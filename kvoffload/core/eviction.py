"""Which block leaves the host first. An eviction policy is one small class here and one line in the table below."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from kvoffload.model.ids import SlotId


class EvictionPolicy(Protocol):
    """An order over the evictable slots. It sees only slots that may be evicted right now.

    Recency is the order of calls: a slot that is used leaves the order and comes back later, so `add` is its touch.
    Slots that were used together come back deepest first.
    """

    def add(self, slot: SlotId) -> None:
        """Take a slot in as the most recently used."""

    def remove(self, slot: SlotId) -> None:
        """Let a slot go: it is in use, evicted or written off."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[SlotId]:
        """Go through the slots, the next victim first. Reads only."""


class LruOrder:
    """Least recently used first."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[SlotId, None] = OrderedDict()

    def add(self, slot: SlotId) -> None:
        self._order[slot] = None

    def remove(self, slot: SlotId) -> None:
        del self._order[slot]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[SlotId]:
        return iter(self._order)


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruOrder}
"""What `eviction_policy` may name."""
