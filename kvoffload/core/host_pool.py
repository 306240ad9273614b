"""The host pool: one record per slot is the truth; free slots, key index and eviction order follow it.

A slot's record is its state, key, pins and holds. Pins keep its bytes (a lookup found it, a load reads it); holds only
keep it out of the eviction order (a running request stored or hit it, so that a small pool does not churn).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import cast

from kvoffload.core.eviction import EvictionPolicy
from kvoffload.core.key_index import KeyIndex
from kvoffload.core.states import SLOT_STEPS, SlotEvent, SlotState
from kvoffload.model.errors import ClosedTwice, IllegalTransition
from kvoffload.model.ids import BlockKey, SlotId

_CAN_HIT = (SlotState.READY, SlotState.PINNED)


class Pins:
    """Keeps slots from eviction until it is closed, exactly once."""

    __slots__ = ("_pool", "closed", "slots")

    def __init__(self, pool: HostPool, slots: tuple[SlotId, ...]) -> None:
        self._pool = pool
        self.slots = slots
        self.closed = False

    def close(self) -> None:
        """Give the slots back, the deepest first. Changes the pool.

        Raises:
            ClosedTwice: it was closed before.
        """
        if self.closed:
            raise ClosedTwice(self)
        self.closed = True
        self._pool._unpin(self.slots)

    def __repr__(self) -> str:
        return f"<Pins {len(self.slots)} slots{' closed' if self.closed else ''}>"


class HostPool:
    """The host slots of one engine. Its capacity starts at 0 and grows as the ranks have memory ready."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._states = bytearray()
        self._keys: list[BlockKey | None] = []
        self._pins: dict[SlotId, int] = {}
        self._holds: dict[SlotId, int] = {}
        self.index = KeyIndex()
        """The slots that can hit (READY or PINNED) by key. An answer is worthless until pinned."""
        self._freed: list[SlotId] = []
        self._fresh = 0
        self._order = policy
        self._counts = [0] * len(SlotState)

    # -- questions, which change nothing ------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return len(self._states)

    @property
    def room(self) -> int:
        """Slots that `reserve` could give now."""
        return self._counts[SlotState.EMPTY] + len(self._order)

    def count(self, state: SlotState) -> int:
        """Return how many slots are in a state."""
        return self._counts[state]

    def state(self, slot: SlotId) -> SlotState:
        """Return a slot's state."""
        return SlotState(self._states[slot])

    def key(self, slot: SlotId) -> BlockKey | None:
        """Return the key of a slot that is not empty."""
        return self._keys[slot]

    def indexed_key(self, slot: SlotId) -> BlockKey | None:
        """Return the key under which a slot can hit, None for one that cannot."""
        return self._keys[slot] if self._states[slot] in _CAN_HIT else None

    def pins(self) -> Mapping[SlotId, int]:
        """Return how often each slot is pinned."""
        return self._pins

    def holds(self) -> Mapping[SlotId, int]:
        """Return how often each slot is held."""
        return self._holds

    def problems(self) -> list[str]:
        """Return where the eviction order or the free slots disagree with the slots' records."""
        ready = {slot for slot, state in enumerate(self._states) if state == SlotState.READY}
        empty = [slot for slot, state in enumerate(self._states) if state == SlotState.EMPTY]
        problems = []
        if ready - self._holds.keys() != set(self._order) or len(self._order) != len(set(self._order)):
            problems.append("the eviction order is not the ready slots that nobody holds")
        if sorted([*self._freed, *range(self._fresh, len(self._states))]) != empty:
            problems.append("the free slots are not the empty ones")
        return problems

    # -- changes ------------------------------------------------------------------------------------------------

    def grow(self, capacity: int) -> int:
        """Make the pool at least this large; return by how many slots it grew."""
        more = max(capacity - len(self._states), 0)
        self._states.extend(bytes(more))
        self._keys.extend([None] * more)
        self._counts[SlotState.EMPTY] += more
        return more

    def reserve(self, keys: Sequence[BlockKey]) -> tuple[tuple[SlotId, ...], tuple[BlockKey, ...]]:
        """Give each key a slot to be filled, evicting where none is empty; all or nothing.

        Returns:
            The slots, in ascending order so that neighbours merge into one copy, and the keys that were evicted.

        Raises:
            ValueError: more keys than `room`; nothing has changed.
        """
        if len(keys) > self.room:
            raise ValueError(f"{len(keys)} slots asked for, {self.room} to be had")
        # Nothing below can fail.
        missing = len(keys) - self._counts[SlotState.EMPTY]
        evicted = self._evict(tuple(islice(self._order, max(missing, 0))))
        slots = self._take_empty(len(keys))
        self._move_all(slots, SlotEvent.RESERVE)
        for slot, key in zip(slots, keys, strict=True):
            self._keys[slot] = key
        return slots, evicted

    def fill(self, slots: Sequence[SlotId]) -> None:
        """These slots' bytes are whole on every rank: they can hit from now on, the last of them as used last."""
        self._move_all(slots, SlotEvent.FILL)
        self.index.came([(key, slot) for slot in slots if (key := self._keys[slot]) is not None])
        holds, order = self._holds, self._order
        for slot in slots:
            if slot not in holds:
                order.add(slot)

    def pin(self, slots: tuple[SlotId, ...]) -> Pins:
        """Keep slots that can hit from eviction.

        Raises:
            IllegalTransition: one of them cannot hit; nothing has changed.
        """
        pins, order, holds, states = self._pins, self._order, self._holds, self._states
        for slot in slots:
            if states[slot] not in _CAN_HIT:
                raise IllegalTransition("slot", SlotState(states[slot]), SlotEvent.PIN)
        # Nothing below can fail.
        for slot in slots:
            count = pins.get(slot, 0)
            if count == 0:
                self._move(slot, SlotEvent.PIN)
                if slot not in holds:
                    order.remove(slot)
            pins[slot] = count + 1
        return Pins(self, slots)

    def hold(self, slot: SlotId) -> None:
        """Keep a slot out of the eviction order while a running request counts on it."""
        count = self._holds.get(slot, 0)
        if count == 0 and self._states[slot] == SlotState.READY:
            self._order.remove(slot)
        self._holds[slot] = count + 1

    def unhold(self, slot: SlotId) -> None:
        """Undo one `hold`. The caller goes through a request's slots deepest first."""
        count = self._holds[slot] - 1
        if count:
            self._holds[slot] = count
            return
        del self._holds[slot]
        if self._states[slot] == SlotState.READY:
            self._order.add(slot)

    def touch(self, slot: SlotId) -> bool:
        """Note a use of a slot that can hit; return whether it may be evicted."""
        if self._states[slot] != SlotState.READY or slot in self._holds:
            return False
        self._order.remove(slot)
        self._order.add(slot)
        return True

    def doom(self, slot: SlotId) -> bool:
        """Make a slot's bytes worthless at once; return whether they could hit until now.

        A READY slot becomes EMPTY; a FILLING or PINNED one drains until its last copy and pin have ended.
        """
        # Once a slot drains, its key may be another slot's.
        could_hit = self._forget_key(slot)
        if self._states[slot] == SlotState.READY:
            self._discard(slot)
        elif self._states[slot] in (SlotState.FILLING, SlotState.PINNED):
            self._move(slot, SlotEvent.DOOM)
        return could_hit

    def drained(self, slots: Iterable[SlotId]) -> None:
        """The last store copy on these slots has ended: those that are DRAINING, and not pinned, are empty."""
        states, draining = self._states, SlotState.DRAINING
        for slot in slots:
            if states[slot] == draining and slot not in self._pins:
                self._move(slot, SlotEvent.DRAIN)
                self._empty(slot)

    def quarantine(self, slot: SlotId) -> bool:
        """Never hand this slot out again; return whether it could hit until now."""
        if self._states[slot] == SlotState.QUARANTINED:
            return False
        could_hit = self._forget_key(slot)
        if self._states[slot] == SlotState.READY and slot not in self._holds:
            self._order.remove(slot)
        self._move(slot, SlotEvent.QUARANTINE)
        self._keys[slot] = None
        return could_hit

    def forget_all(self) -> dict[BlockKey, SlotId]:
        """Empty the index at once (a reset) and return what it held; pinned slots drain.

        Slots that a store is filling are not in the index: whoever owns their jobs dooms them.
        """
        before = self.index.take_all()
        for slot in before.values():
            if self._states[slot] == SlotState.READY:
                self._discard(slot)
            else:
                self._move(slot, SlotEvent.DOOM)
        return before

    # -- inside -------------------------------------------------------------------------------------------------

    def _move(self, slot: SlotId, event: SlotEvent) -> None:
        self._move_all((slot,), event)

    def _move_all(self, slots: Iterable[SlotId], event: SlotEvent) -> None:
        """The same for many: one call, as each stored block comes by here twice."""
        steps, states, counts = SLOT_STEPS[event], self._states, self._counts
        for slot in slots:
            before = states[slot]
            after = steps[before]
            if after is None:
                raise IllegalTransition("slot", SlotState(before), event)
            states[slot] = after
            counts[before] -= 1
            counts[after] += 1

    def _unpin(self, slots: Sequence[SlotId]) -> None:
        pins = self._pins
        for slot in reversed(slots):
            count = pins[slot] - 1
            if count:
                pins[slot] = count
                continue
            del pins[slot]
            if self._states[slot] == SlotState.PINNED:
                self._move(slot, SlotEvent.UNPIN)
                self._settle(slot)
            elif self._states[slot] == SlotState.DRAINING:
                self._move(slot, SlotEvent.DRAIN)
                self._empty(slot)

    def _settle(self, slot: SlotId) -> None:
        """A slot became READY: it is evictable unless a running request counts on it."""
        if slot not in self._holds:
            self._order.add(slot)

    def _evict(self, slots: Iterable[SlotId]) -> tuple[BlockKey, ...]:
        evicted = []
        for slot in slots:
            key = self._keys[slot]
            assert key is not None, slot
            del self.index[key]
            evicted.append(key)
            self._discard(slot)
        return tuple(evicted)

    def _forget_key(self, slot: SlotId) -> bool:
        """Take a slot that can hit out of the index; return whether it could."""
        key = self.indexed_key(slot)
        if key is not None:
            del self.index[key]
        return key is not None

    def _discard(self, slot: SlotId) -> None:
        if slot not in self._holds:
            self._order.remove(slot)
        self._move(slot, SlotEvent.EVICT)
        self._empty(slot)

    def _empty(self, slot: SlotId) -> None:
        self._keys[slot] = None
        self._freed.append(slot)

    def _take_empty(self, count: int) -> tuple[SlotId, ...]:
        """Freed slots first, so that the arena's far end is touched last."""
        reused = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        first = self._fresh
        self._fresh += count - len(reused)
        return cast("tuple[SlotId, ...]", (*sorted(reused), *range(first, self._fresh)))
