"""A pool of slots. Each slot has one record, from which the free slots, the index and the eviction order are derived.

A slot's record is its state, key, pins and holds. A pin protects the slot's bytes after a lookup has found them, and
while a job reads them. A hold keeps the slot out of the eviction order while a running request that stored or loaded
the block may need it, so that a small pool does not churn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.machine import SLOT, SlotEvent, SlotState
from kvoffload.core.order import Came, EvictionOrder, LruOrder
from kvoffload.model.errors import IllegalTransition
from kvoffload.model.ids import BlockKey, SlotId

_CAN_HIT = (SlotState.READY, SlotState.PINNED)
_READY, _PINNED = map(int, _CAN_HIT)
_EMPTY, _DRAINING, _QUARANTINED = map(int, (SlotState.EMPTY, SlotState.DRAINING, SlotState.QUARANTINED))
_ONLY_PINNED = bytes((_PINNED,))
_UNWRITTEN = (_READY, _PINNED, _EMPTY)
_FILLED, _USED = Came.FILLED, Came.USED

SlotChange = tuple[SlotId, BlockKey | None, bool]
"""A slot; the key of the block that later processes may find in it, or None; and whether no copy writes it any more."""

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
    unused: list[Item] = []
    for item in items:
        left = counts.pop(item) - 1
        if left:
            counts[item] = left
        else:
            unused.append(item)
    return unused


# -- the pool ----------------------------------------------------------------------------------------------------------


class SlotPool:
    """The slots of one tier. The host's pool starts empty and grows while the ranks prepare host memory.

    Args:
        order: decides which slot is evicted.

    Attributes:
        now: the time in seconds, which the order gets with each use. `OffloadCore` writes it.
    """

    def __init__(self, order: EvictionOrder | None = None) -> None:
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
        self.for_catalog: list[SlotId] | None = None
        """Slots that may have another block than at the last `take_for_catalog`; None if the pool has no catalog."""
        self.private: set[SlotId] = set()
        """With a catalog: slots whose blocks must not outlive this process."""
        self.adopted = bytearray()
        """With a catalog, for each slot: 1 if it has a block of an earlier process that no load has read yet, else 0."""
        self.sessions = array("I")
        """For each slot, the session that alone has used its block, 0 for none. Empty until a session stores a block."""
        self.order = order or LruOrder()
        self.now = 0.0
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
        if not self.fills:  # it is cheap only while the index is empty
            self.index.expect(len(self._states))
        if self.sessions:
            self.sessions.extend(bytes(more))
        if self.for_catalog is not None:
            self.adopted.extend(bytes(more))
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
        more = self.grow(capacity)
        for_catalog, self.for_catalog = self.for_catalog, None  # the catalog has listed these blocks
        if more:
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
        self.for_catalog = for_catalog
        if for_catalog is not None:
            for slot in slots:
                self.adopted[slot] = 1

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
        if self.for_catalog is not None:
            self.for_catalog += slots
            self.private.difference_update(slots)
            for slot in slots:
                self.adopted[slot] = 0
        if self.sessions:
            self.set_session(slots, 0)
        return slots, evicted

    def fill(self, slots: Sequence[SlotId]) -> None:
        """Let lookups find slots that every rank has written. The last slot becomes the most recently used."""
        self._move_all(slots, SlotEvent.FILL)
        self.fills += 1
        if self.for_catalog is not None:
            self.for_catalog += slots
        keys = self._keys
        self.index.add([keys[slot] for slot in slots], slots)  # type: ignore[misc]  # each has a key
        if unheld := self._not_held(slots):
            self.order.add(unheld, _FILLED, self.now)

    def pin(self, slots: Sequence[SlotId]) -> None:
        """Protect slots that can hit from eviction. The caller must unpin each slot later.

        Raises:
            IllegalTransition: a slot cannot hit; nothing has changed.
        """
        pins, once = self.pins, dict.fromkeys(slots, 1)
        again = () if pins.keys().isdisjoint(once) else pins.keys() & slots
        for slot in again:
            if self._states[slot] != _PINNED:
                raise IllegalTransition("slot", SlotState(self._states[slot]), SlotEvent.PIN)
        if new := [slot for slot in once if slot not in again] if again else list(once):
            self._move_all(new, SlotEvent.PIN)
            self.order.remove(self._not_held(new))
        if again or len(once) < len(slots):
            count(pins, slots)
        else:
            pins.update(once)

    def unpin(self, slots: Sequence[SlotId], came: Came = _USED) -> None:
        """Remove one pin of each slot. The slots are listed heads first, so the last of them is evicted first.

        Raises:
            KeyError: a slot is not pinned; nothing has changed.
        """
        free = uncount(self.pins, slots[::-1])
        if not free:
            return
        states = self._states
        if bytes([states[slot] for slot in free]).translate(None, _ONLY_PINNED):
            self.drained(free)
            free = self.pinned(free)
        self._move_all(free, SlotEvent.UNPIN)
        if unheld := self._not_held(free):
            self.order.add(unheld, came, self.now)

    def hold(self, slots: Sequence[SlotId]) -> None:
        """Keep slots out of the eviction order until `release` or `use` undoes the hold."""
        if ready := self._ready(tuple(dict.fromkeys(slots))):
            self.order.remove(self._not_held(ready))
        count(self.holds, slots)

    def release(self, slots: Sequence[SlotId]) -> None:
        """Undo one `hold` of each slot. The slots are listed deepest first, so the first of them is evicted first."""
        self.order.add(self._ready(uncount(self.holds, slots)), Came.RELEASED, self.now)

    def use(self, slots: Sequence[SlotId], held: Sequence[SlotId] = ()) -> int:
        """Mark slots as used, the last slot most recently, and undo one `hold` of each slot in `held`.

        If a slot is listed twice in `slots`, the last position counts.

        Returns:
            How many of the slots can be evicted afterwards.
        """
        once = dict.fromkeys(slots[::-1])
        ready = self._ready(slots if len(once) == len(slots) else [*reversed(once)])
        if held:
            uncount(self.holds, held)
        unheld = self._not_held(ready)
        self.order.renew(unheld, self.now)
        return len(unheld)

    def set_session(self, slots: Iterable[SlotId], session: int) -> None:
        """Record which session alone has used these slots' blocks; 0 for none."""
        if not self.sessions:
            self.sessions = array("I", bytes(4 * self.capacity))
        for slot in slots:
            self.sessions[slot] = session

    def leave_early(self, slots: Sequence[SlotId]) -> int:
        """Let slots age faster that can be evicted now, the first one ahead of the others; return how many."""
        unheld = self._not_held(self._ready(slots))
        self.order.remove(unheld)
        self.order.add(unheld, Came.ENDED, self.now)
        return len(unheld)

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
            if self.for_catalog is not None:
                self.for_catalog.append(slot)
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
        if self.for_catalog is not None:
            self.for_catalog.append(slot)
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

    def read(self, slots: Iterable[SlotId]) -> int:
        """Record that a load reads these slots; return how many have adopted blocks that no load has read before."""
        adopted, count = self.adopted, 0
        for slot in slots:
            count += adopted[slot]
            adopted[slot] = 0
        return count

    def take_for_catalog(self) -> list[SlotChange]:
        """Return the slots that changed since the last call, in the order of their last change."""
        assert self.for_catalog is not None, "the pool has no catalog"
        slots = dict.fromkeys(reversed(self.for_catalog))
        self.for_catalog.clear()  # in place: hooks look at the list
        keys, states, private = self._keys, self._states, self.private
        return [
            (
                slot,
                keys[slot] if states[slot] in _CAN_HIT and slot not in private else None,
                states[slot] in _UNWRITTEN,
            )
            for slot in reversed(slots)
        ]

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
        if wrong := bytes([states[slot] for slot in slots]).translate(None, before):
            raise IllegalTransition("slot", SlotState(wrong[0]), event)
        for slot in slots:
            states[slot] = after
        moved = len(slots)
        self._counts[before[0]] -= moved
        self._counts[after] += moved

    def _ready(self, slots: Sequence[SlotId]) -> Sequence[SlotId]:
        known = self._states
        states = bytes([known[slot] for slot in slots])
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
        slots = self.order.take(count, self.now)
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
        if self.for_catalog is not None:
            slots = tuple(slots)
            self.for_catalog += slots
        for slot in slots:
            keys[slot] = None
            freed.append(slot)
