"""A pool of slots. Each slot has one record, from which the free slots, the index and the eviction order are derived.

A slot's record is its state, key, pins and holds. A pin protects the slot's bytes after a lookup has found them, and
while a job reads them. A hold keeps the slot out of the eviction order while a running request that stored or loaded
the block may need it, so that a small pool does not churn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.machine import SLOT, SlotEvent, SlotState
from kvoffload.model.errors import IllegalTransition
from kvoffload.model.ids import BlockKey, SlotId

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_READY, _PINNED = map(int, _CAN_HIT)
_EMPTY, _DRAINING, _QUARANTINED = map(int, (SlotState.EMPTY, SlotState.DRAINING, SlotState.QUARANTINED))
_ONLY_PINNED = bytes((_PINNED,))

# -- eviction ----------------------------------------------------------------------------------------------------------


class LruOrder:
    """The slots that can be evicted now, least recently used first.

    A slot leaves the order while it is in use and joins the end afterwards. Slots that were used together join the
    deepest first.

    The order is a ring: two lists hold each slot's next and previous slot. The ring begins and ends at -1, which in a
    Python list is the index of the last item. Including the time of each slot's last use, the order takes 24 bytes per
    slot. An `OrderedDict` takes 100 to 160 bytes per slot, and is sometimes rebuilt inside a hook.
    """

    __slots__ = ("_after", "_before", "_used_at", "age_s", "count", "now")

    def __init__(self) -> None:
        self._after = [_END]
        self._before = [_END]
        self._used_at = [0.0]
        self.now = 0.0
        """The current time in seconds, which the caller sets; `add` records it as the slots' last use."""
        self.age_s = 0.0
        """Of the slots that the last `take` returned, the seconds since the most recent use."""
        self.count = 0
        """The number of slots in the order."""

    def grow(self, capacity: int) -> None:
        """Make room for slots with numbers below `capacity`, so that `add`, which hooks call, allocates no memory."""
        for links in (self._after, self._before):
            links[-1:-1] = [_ABSENT] * (capacity + 1 - len(links))
        self._used_at += [0.0] * (capacity + 1 - len(self._used_at))

    def add(self, slots: Sequence[SlotId]) -> None:
        """Add slots; the last one is the most recently used."""
        after, before, used_at, now = self._after, self._before, self._used_at, self.now
        last = before[-1]
        for slot in slots:
            used_at[slot] = now
            after[last] = slot
            before[slot] = last
            last = slot
        after[last] = _END
        before[_END] = last
        self.count += len(slots)

    def remove(self, slots: Sequence[SlotId]) -> None:
        """Remove slots. The order must contain all of them."""
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
        """Remove and return up to `count` slots, in the order of eviction."""
        after, taken = self._after, list[SlotId]()
        slot = after[-1]
        for _ in range(min(count, self.count)):
            taken.append(slot)
            following, after[slot] = after[slot], _ABSENT
            slot = following
        after[_END] = slot
        self._before[slot] = _END
        self.count -= len(taken)
        self.age_s = self.now - self._used_at[taken[-1]] if taken else self.age_s
        return taken

    def __iter__(self) -> Iterator[SlotId]:
        """Yield the slots in the order of eviction."""
        links = self._after
        slot = links[-1]
        # The count bounds the loop, so that an audit of a broken ring ends.
        for _ in range(self.count):
            yield slot
            slot = links[slot]


_END = SlotId(-1)
_ABSENT = SlotId(-2)


# -- counts ------------------------------------------------------------------------------------------------------------

Item = TypeVar("Item")


def count(counts: dict[Item, int], items: Sequence[Item]) -> None:
    once = dict.fromkeys(items, 1)
    if len(once) == len(items) and counts.keys().isdisjoint(once):
        counts.update(once)
        return
    for item in items:
        counts[item] = counts.get(item, 0) + 1


def uncount(counts: dict[Item, int], items: Sequence[Item]) -> Sequence[Item]:
    """Subtract 1 from each item's count; return the items whose count is 0 now, in the same order.

    Raises:
        KeyError: an item has no count; nothing has changed.
    """
    if sum(map(counts.__getitem__, items)) == len(items):
        for item in items:
            del counts[item]
        return items
    unused = list[Item]()
    for item in items:
        left = counts.pop(item) - 1
        if left:
            counts[item] = left
        else:
            unused.append(item)
    return unused


# -- the pool ----------------------------------------------------------------------------------------------------------


class SlotPool:
    """The slots of one tier. The host's pool starts empty and grows while the ranks prepare host memory."""

    def __init__(self) -> None:
        self._states = bytearray()
        self._keys: list[BlockKey | None] = []
        self.pins: dict[SlotId, int] = {}
        """The number of pins of each pinned slot."""
        self.holds: dict[SlotId, int] = {}
        """The number of holds of each held slot."""
        self.index = KeyIndex()
        """The slots that can hit (READY or PINNED) by key. A slot must be pinned before its bytes are used."""
        self.losses = self.fills = 0
        """How many times a block left the index other than by eviction, and how many times blocks joined it."""
        self._freed: list[SlotId] = []
        self._fresh = 0
        self.order = LruOrder()
        self._counts = [0] * len(SlotState)

    # -- queries; they change nothing ---------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return len(self._states)

    @property
    def room(self) -> int:
        """Return the number of slots that `reserve` could allocate now."""
        return self._counts[_EMPTY] + self.order.count

    def count(self, state: SlotState) -> int:
        return self._counts[state]

    def state(self, slot: SlotId) -> SlotState:
        return SlotState(self._states[slot])

    def key(self, slot: SlotId) -> BlockKey | None:
        """Return the key of a slot that is not empty."""
        return self._keys[slot]

    def indexed_key(self, slot: SlotId) -> BlockKey | None:
        """Return the key under which a slot can hit, or None if it cannot hit."""
        return self._keys[slot] if self._states[slot] in _CAN_HIT else None

    def count_evictable(self, slots: Sequence[SlotId]) -> int:
        """Return how many of these distinct slots could be evicted now."""
        return len(self._not_held(self._ready(slots)))

    def pinned(self, slots: Iterable[SlotId]) -> list[SlotId]:
        """Return the PINNED slots among `slots`."""
        states = self._states
        return [slot for slot in slots if states[slot] == _PINNED]

    # -- changes ------------------------------------------------------------------------------------------------

    def grow(self, capacity: int) -> int:
        """Grow the pool to at least this capacity; return how many slots were added."""
        more = max(capacity - len(self._states), 0)
        self._states.extend(bytes(more))
        self._keys.extend([None] * more)
        self.order.grow(len(self._states))
        self._counts[SlotState.EMPTY] += more
        return more

    def adopt(self, capacity: int, blocks: Mapping[SlotId, BlockKey], free: Sequence[SlotId]) -> None:
        """Add a part of the slots that an earlier process filled.

        Args:
            capacity: the number of slots known so far. A slot that no part lists stays QUARANTINED.
            blocks: the keys of slots with blocks, the most recently used last.
            free: empty slots.
        """
        slots, counts = list(blocks), self._counts
        self.index.expect(capacity)
        if more := self.grow(capacity):
            self._states[-more:] = bytes([_QUARANTINED]) * more
            counts[_EMPTY] -= more
            counts[_QUARANTINED] += more
            self._fresh = capacity
        for slot in (*slots, *free):
            self._states[slot] = _EMPTY
        counts[_QUARANTINED] -= len(slots) + len(free)
        counts[_EMPTY] += len(slots) + len(free)
        self._move_all(slots, SlotEvent.RESERVE)
        for slot, key in blocks.items():
            self._keys[slot] = key
        self.fill(slots)
        self._freed += free

    def reserve(self, keys: Sequence[BlockKey]) -> tuple[list[SlotId], Sequence[BlockKey]]:
        """Allocate a slot for each key, evicting blocks if too few slots are empty. All keys get a slot, or none does.

        Returns:
            The slots, in ascending order so that copies of neighbours can be merged, and the keys that were evicted.

        Raises:
            ValueError: more keys than `room`; nothing has changed.
        """
        wanted = len(keys)
        missing = wanted - self._counts[_EMPTY]
        if missing > self.order.count:
            raise ValueError(f"{len(keys)} slots requested, only {self.room} can be allocated")
        # Nothing after this line can raise.
        evicted = self._evict(missing) if missing > 0 else ()
        # Use freed slots first, so that untouched host memory is used only when needed.
        slots, fresh = self._freed[-wanted:] if wanted else [], self._fresh
        del self._freed[len(self._freed) - len(slots) :]
        slots.sort()
        for slot, key in zip(slots, keys, strict=False):
            self._keys[slot] = key
        if more := wanted - len(slots):
            self._fresh = end = fresh + more
            self._keys[fresh:end] = keys[-more:]
            slots += range(fresh, end)  # type: ignore[arg-type]  # calling `SlotId` for each slot would take time
        self._move_all(slots, SlotEvent.RESERVE)
        return slots, evicted

    def fill(self, slots: Sequence[SlotId]) -> None:
        """Let lookups find slots that every rank has written. The last slot becomes the most recently used."""
        self._move_all(slots, SlotEvent.FILL)
        self.fills += 1
        self.index.add(list(map(self._keys.__getitem__, slots)), slots)  # type: ignore[arg-type]  # each has a key
        if unheld := self._not_held(slots):
            self.order.add(unheld)

    def pin(self, slots: Sequence[SlotId]) -> None:
        """Protect slots that can hit from eviction. The caller must unpin each slot later.

        Raises:
            IllegalTransition: a slot cannot hit; nothing has changed.
        """
        pins, once = self.pins, dict.fromkeys(slots, 1)
        again = pins.keys() & slots
        for slot in again:
            if self._states[slot] != _PINNED:
                raise IllegalTransition("slot", SlotState(self._states[slot]), SlotEvent.PIN)
        if new := [slot for slot in once if slot not in again]:
            self._move_all(new, SlotEvent.PIN)
            self.order.remove(self._not_held(new))
        if again or len(once) < len(slots):
            count(pins, slots)
        else:
            pins.update(once)

    def unpin(self, slots: Sequence[SlotId]) -> None:
        """Remove one pin of each slot. The slots are listed heads first, so the last of them is evicted first.

        Raises:
            KeyError: a slot is not pinned; nothing has changed.
        """
        free = uncount(self.pins, slots[::-1])
        if not free:
            return
        if bytes(map(self._states.__getitem__, free)).translate(None, _ONLY_PINNED):
            self.drained(free)
            free = self.pinned(free)
        self._move_all(free, SlotEvent.UNPIN)
        if unheld := self._not_held(free):
            self.order.add(unheld)

    def hold(self, slots: Sequence[SlotId]) -> None:
        """Keep slots out of the eviction order until `release` or `use` undoes the hold."""
        if ready := self._ready(tuple(dict.fromkeys(slots))):
            self.order.remove(self._not_held(ready))
        count(self.holds, slots)

    def release(self, slots: Sequence[SlotId]) -> None:
        """Undo one `hold` of each slot. The slots are listed deepest first, so the first of them is evicted first."""
        self.order.add(self._ready(uncount(self.holds, slots)))

    def use(self, slots: Sequence[SlotId], held: Mapping[SlotId, int]) -> int:
        """Mark slots as used, the last slot most recently, and undo `held[slot]` holds of each slot.

        If a slot is listed twice, the last position counts.

        Returns:
            How many of the slots can be evicted afterwards.
        """
        holds, states, order = self.holds, self._states, self.order
        moved, last = list[SlotId](), list[SlotId]()
        for slot in reversed(dict.fromkeys(reversed(slots))):
            had = holds.get(slot, 0)
            left = had - held.get(slot, 0)
            if had:
                del holds[slot]
            if left:
                holds[slot] = left
            elif states[slot] == _READY:
                last.append(slot)
                if not had:
                    moved.append(slot)
        if last:
            order.remove(moved)
            order.add(last)
        return len(last)

    def invalidate(self, slot: SlotId) -> bool:
        """Remove a slot from the index; return whether lookups could find the slot before.

        A READY slot becomes EMPTY. A FILLING or PINNED slot is DRAINING until its last copy and pin have ended.
        """
        # Remove the key at once, because another slot may get the same key while this slot drains.
        could_hit = self._forget_key(slot)
        if self._states[slot] == SlotState.READY:
            self.order.remove(self._not_held((slot,)))
            self._move(slot, SlotEvent.EVICT)
            self._empty((slot,))
        elif self._states[slot] in (SlotState.FILLING, SlotState.PINNED):
            self._move(slot, SlotEvent.INVALIDATE)
        return could_hit

    def drained(self, slots: Iterable[SlotId]) -> None:
        """Free the DRAINING slots among `slots`. Their copies must have ended, and no slot may be pinned."""
        empty = [slot for slot in slots if self._states[slot] == _DRAINING]
        if empty:
            self._move_all(empty, SlotEvent.DRAIN)
            self._empty(empty)

    def quarantine(self, slot: SlotId) -> bool:
        """Never allocate a slot again; return whether lookups could find the slot before."""
        if self._states[slot] == SlotState.QUARANTINED:
            return False
        could_hit = self._forget_key(slot)
        if self._states[slot] == SlotState.READY and slot not in self.holds:
            self.order.remove((slot,))
        self._move(slot, SlotEvent.QUARANTINE)
        self._keys[slot] = None
        return could_hit

    def forget_all(self) -> Mapping[BlockKey, SlotId]:
        """Empty the index for a reset; return its former keys and slots. Pinned slots become DRAINING.

        FILLING slots stay: they are not in the index, and the owners of the jobs that fill them invalidate them.
        """
        ready = [SlotId(slot) for slot, state in enumerate(self._states) if state == _READY]
        pinned = [SlotId(slot) for slot, state in enumerate(self._states) if state == _PINNED]
        self.order.remove(self._not_held(ready))
        self._move_all(ready, SlotEvent.EVICT)
        self._empty(ready)
        for slot in pinned:
            self._move(slot, SlotEvent.INVALIDATE)
        self.losses += 1
        return self.index.take_all()

    # -- internal -----------------------------------------------------------------------------------------------

    def _move(self, slot: SlotId, event: SlotEvent) -> None:
        before = self._states[slot]
        after = SLOT.steps[event][before]
        self._states[slot] = after
        self._counts[before] -= 1
        self._counts[after] += 1

    def _move_all(self, slots: Sequence[SlotId], event: SlotEvent) -> None:
        """Apply an event that is legal in a single state to distinct slots. If one has another state, change none."""
        states, (before, after) = self._states, SLOT.only[event]
        if wrong := bytes(map(states.__getitem__, slots)).translate(None, before):
            raise IllegalTransition("slot", SlotState(wrong[0]), event)
        for slot in slots:
            states[slot] = after
        moved = len(slots)
        self._counts[before[0]] -= moved
        self._counts[after] += moved

    def _ready(self, slots: Sequence[SlotId]) -> Sequence[SlotId]:
        states = bytes(map(self._states.__getitem__, slots))
        ready = states.count(_READY)
        if ready == len(slots):
            return slots
        return [slot for slot, state in zip(slots, states, strict=True) if state == _READY] if ready else ()

    def _not_held(self, slots: Sequence[SlotId]) -> Sequence[SlotId]:
        holds = self.holds
        if holds.keys().isdisjoint(slots):
            return slots
        return [slot for slot in slots if slot not in holds]

    def _evict(self, count: int) -> Sequence[BlockKey]:
        """Free the first `count` slots of the eviction order; return the keys of their blocks."""
        slots = self.order.take(count)
        evicted = [key for slot in slots if (key := self._keys[slot]) is not None]
        self._move_all(slots, SlotEvent.EVICT)
        self.index.remove(evicted)
        self._freed += slots  # `reserve` overwrites the old keys in `_keys`
        return evicted

    def _forget_key(self, slot: SlotId) -> bool:
        """Remove a slot from the index if it is there; return whether it was there."""
        key = self.indexed_key(slot)
        if key is not None:
            self.index.remove((key,))
            self.losses += 1
        return key is not None

    def _empty(self, slots: Iterable[SlotId]) -> None:
        keys, freed = self._keys, self._freed
        for slot in slots:
            keys[slot] = None
            freed.append(slot)
