"""Which block leaves a pool first. An eviction policy is one small class here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvoffload.model.ids import SlotId


class EvictionPolicy(Protocol):
    """An order over the evictable slots. It sees only slots that may be evicted right now.

    Recency is the order of calls: a slot that is used leaves the order and comes back later, so `add` is its touch.
    Slots that were used together come back deepest first.
    """

    def grow(self, capacity: int) -> None:
        """Slots with lower numbers than this may come from now on. Memory is taken here, not in `add`, which is in a step."""

    def add(self, slots: Sequence[SlotId]) -> None:
        """Take slots in, the last of them as the most recently used."""

    def remove(self, slots: Sequence[SlotId]) -> None:
        """Let slots go: they are in use, evicted or written off."""

    def take(self, count: int) -> Sequence[SlotId]:
        """Remove and return up to `count` slots, the next victim first."""

    count: int
    """How many slots there are."""

    def __iter__(self) -> Iterator[SlotId]:
        """Go through the slots, the next victim first. Reads only."""


class LruOrder:
    """Least recently used first.

    A ring: each slot knows the one after it and the one before. The ring begins and ends at -1, which Python's lists take
    as their last place. It takes 16 bytes a slot, and every change touches a few places only: an `OrderedDict` takes 100
    to 160 bytes, and now and then copies itself inside a hook.
    """

    __slots__ = ("_after", "_before", "count")

    def __init__(self) -> None:
        self._after = [_END]
        self._before = [_END]
        self.count = 0

    def grow(self, capacity: int) -> None:
        for links in (self._after, self._before):
            links[-1:-1] = [_ABSENT] * (capacity + 1 - len(links))

    def add(self, slots: Sequence[SlotId]) -> None:
        after, before = self._after, self._before
        last = before[-1]
        for slot in slots:
            after[last] = slot
            before[slot] = last
            last = slot
        after[last] = _END
        before[_END] = last
        self.count += len(slots)

    def remove(self, slots: Sequence[SlotId]) -> None:
        after, before = self._after, self._before
        for slot in slots:
            following, preceding = after[slot], before[slot]
            if following == _ABSENT:
                raise KeyError(slot)
            after[preceding] = following
            before[following] = preceding
            after[slot] = _ABSENT
        self.count -= len(slots)

    def take(self, count: int) -> Sequence[SlotId]:
        after, taken = self._after, list[SlotId]()
        slot = after[-1]
        for _ in range(min(count, self.count)):
            taken.append(slot)
            following, after[slot] = after[slot], _ABSENT
            slot = following
        after[_END] = slot
        self._before[slot] = _END
        self.count -= len(taken)
        return taken

    def __iter__(self) -> Iterator[SlotId]:
        links = self._after
        slot = links[-1]
        for _ in range(self.count):  # not until the ring's end: an audit must end also on a broken one
            yield slot
            slot = links[slot]


_END = SlotId(-1)
_ABSENT = SlotId(-2)
