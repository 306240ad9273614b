"""The order in which slots are evicted: what an order must do, and the order in use."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Protocol

from kvoffload.model.ids import SlotId


class Came(Enum):
    """Why a slot joins the order."""

    # A block was fetched, or an earlier process left it. A stored block mostly joins as RELEASED: its request holds it.
    FILLED = 0
    # A request used the block: a hit was loaded or dropped, or the request's own blocks were marked as used, among them
    # blocks that it has just stored.
    USED = 1
    RELEASED = 2  # a request that held the slot has ended
    COPIED = 3  # a copy to or from a lower tier has ended, which is no use of the block
    ENDED = 4  # the only session that used the block has ended, says its client


class EvictionOrder(Protocol):
    """The slots of a pool that can be evicted now.

    A slot leaves the order while it is in use, and joins it afterwards. Slots that join together are listed deepest
    first, and must be taken in this order: without its head, the rest of a prefix is useless (R15). Hooks call all
    methods, so none may take time that grows with the number of slots in the order.

    Only `take` says that a slot loses its block. A slot that is removed may come back with the same block, after a pin, or
    with another one, after its block was invalidated or the cache was reset. So an order that remembers uses beyond
    `remove` may count those of an earlier block.
    """

    age_s: float
    """Of the slots that the last `take` returned, the seconds since the most recent use."""

    @property
    def used_at(self) -> Sequence[float]:
        """Return for each slot the time in seconds at which it last joined the order, 0 if never. Always the same object."""

    @property
    def count(self) -> int:
        """Return the number of slots in the order."""

    def grow(self, capacity: int) -> None:
        """Make room for slots with numbers below `capacity`."""

    def add(self, slots: Sequence[SlotId], came: Came, now: float) -> None:
        """Add slots; the first one must be taken first. `now` is the time in seconds."""

    def renew(self, slots: Sequence[SlotId], now: float) -> None:
        """Add slots that were used, as USED; those in the order move to their new place."""

    def remove(self, slots: Sequence[SlotId]) -> None:
        """Remove slots. Raises KeyError if one is not in the order."""

    def take(self, count: int, now: float) -> Sequence[SlotId]:
        """Remove and return up to `count` slots, the next one to evict first."""

    def __iter__(self) -> Iterator[SlotId]:
        """Yield the slots in the order of eviction, those of ended sessions first. At most `count`, even if it is broken."""


class LruOrder:
    """The slots that can be evicted now, least recently used first. Those of ended sessions age `FASTER` times as fast.

    Clients say which sessions have ended, so the order must not depend on their honesty. If such slots always left
    first, then with enough of them no other slot would ever leave, used or not.

    The order is a ring: two arrays hold each slot's next and previous slot. The ring begins and ends at -1, which in
    Python is the index of the last item. Including the time of each slot's last use, the order takes 16 bytes per slot,
    and the garbage collector does not walk it. An `OrderedDict` takes 100 to 160 bytes per slot, and is sometimes
    rebuilt inside a hook.
    """

    __slots__ = ("_after", "_before", "_last_ended", "age_s", "count", "used_at")

    def __init__(self) -> None:
        self._after = array("i", [_END])
        self._before = array("i", [_END])
        self.used_at = array("d", [0.0])
        # The ring begins with the slots of ended sessions. This one is the last of them; -1 if there are none.
        self._last_ended = _END
        self.age_s = 0.0
        self.count = 0

    def grow(self, capacity: int) -> None:
        """Make room for slots with numbers below `capacity`, so that `add`, which hooks call, allocates no memory."""
        for links in (self._after, self._before):
            links[-1:-1] = array("i", [_ABSENT]) * (capacity + 1 - len(links))
        self.used_at.extend(array("d", [0.0]) * (capacity + 1 - len(self.used_at)))

    def add(self, slots: Sequence[SlotId], came: Came, now: float) -> None:
        """Add slots; the last one is the most recently used. Each use counts alike."""
        after, before, used_at = self._after, self._before, self.used_at
        last = self._last_ended if came is _ENDED else before[-1]
        following = after[last]
        for slot in slots:
            used_at[slot] = now
            after[last] = slot
            before[slot] = last
            last = slot
        after[last] = following
        before[following] = last
        if came is _ENDED:
            self._last_ended = SlotId(last)
        self.count += len(slots)

    def renew(self, slots: Sequence[SlotId], now: float) -> None:
        """Make slots the most recently used, the last one most recently, whether they are in the order or not.

        The slots of a prefix mostly joined together, so they are neighbours, and move together.
        """
        after, before, used_at, last_ended = self._after, self._before, self.used_at, self._last_ended
        head: int = _END  # the first of the slots to move, the last of them, and the slot behind them
        tail: int = _END
        following: int = _END  # also if there are none, or if they are at the end already
        for slot in slots:
            used_at[slot] = now
            if after[slot] == _ABSENT:
                self.count += 1
                if following == _ABSENT:  # it joins together with the slots before it
                    after[tail], before[slot] = slot, tail
                    tail = slot
                    continue
            if slot != following:
                if following != _END:
                    self._move_to_end(head, tail, following)
                head = slot
            if slot == last_ended:
                self._last_ended = last_ended = SlotId(before[head])
            tail, following = slot, after[slot]
        if following != _END:
            self._move_to_end(head, tail, following)

    def _move_to_end(self, head: int, tail: int, following: int) -> None:
        """Move the linked slots from `head` to `tail` to the end; `following` is behind them if they are in the order."""
        after, before = self._after, self._before
        if following != _ABSENT:
            preceding = before[head]
            after[preceding] = following
            before[following] = preceding
        last = before[_END]
        after[last] = head
        before[head] = last
        after[tail] = _END
        before[_END] = tail

    def remove(self, slots: Sequence[SlotId]) -> None:
        """Remove slots. The order must contain all of them.

        Slots that joined together are neighbours, and mostly leave together from the last to the first. So the links
        around a gap are written once, when it is complete.
        """
        after, before, last_ended = self._after, self._before, self._last_ended
        preceding: int = _END
        following = after[_END]
        for slot in slots:
            behind = after[slot]
            if behind == _ABSENT:
                raise KeyError(slot)
            if slot != preceding:  # a new gap
                after[preceding] = following
                before[following] = preceding
                following = behind
            preceding = before[slot]
            after[slot] = _ABSENT
            if slot == last_ended:
                last_ended = SlotId(preceding)
        after[preceding] = following
        before[following] = preceding
        self._last_ended = last_ended
        self.count -= len(slots)

    def take(self, count: int, now: float) -> Sequence[SlotId]:
        """Remove and return up to `count` slots, in the order of eviction."""
        if self._last_ended != _END:
            return self._take_some_ended(count, now)
        after = self._after
        taken: list[SlotId] = []
        slot = after[-1]
        for _ in range(min(count, self.count)):
            taken.append(slot)  # type: ignore[arg-type]  # calling `SlotId` for each slot would take time
            following, after[slot] = after[slot], _ABSENT
            slot = following
        after[_END] = slot
        self._before[slot] = _END
        self.count -= len(taken)
        self.age_s = now - self.used_at[taken[-1]] if taken else self.age_s
        return taken

    def _take_some_ended(self, count: int, now: float) -> Sequence[SlotId]:
        after, used_at = self._after, self.used_at
        taken: list[SlotId] = []
        for _ in range(min(count, self.count)):
            slot, other = SlotId(after[_END]), SlotId(after[self._last_ended])
            if other != _END and now - used_at[other] > FASTER * (now - used_at[slot]):
                slot = other
            self.remove((slot,))
            taken.append(slot)
        if taken:
            self.age_s = now - max([used_at[slot] for slot in taken])
        return taken

    def __iter__(self) -> Iterator[SlotId]:
        """Yield the slots of ended sessions, then the others, each least recently used first."""
        links = self._after
        slot = links[-1]
        # The count bounds the loop, so that an audit of a broken ring ends.
        for _ in range(self.count):
            yield slot  # type: ignore[misc]  # as above
            slot = links[slot]


FASTER = 8
"""How much faster a slot ages whose only session has ended, says its client."""
_ENDED = Came.ENDED
_END = SlotId(-1)
_ABSENT = SlotId(-2)
