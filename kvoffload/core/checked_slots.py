"""Which slots were checked: on an engine that cannot recover a load, a hit is promised on those alone.

A slot counts as checked from the end of its check for as long as some request's hit keeps it pinned, since nothing else
may write to it so long. What failing memory does to it meanwhile is noticed when it has been loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from kvoffload.model.ids import SlotId


class CheckedSlots:
    """The only writer of what is being checked and what was.

    Args:
        is_needed: hits are promised on checked slots only; else nothing is kept here.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed
        self._checked: set[SlotId] = set()
        self._reading: set[SlotId] = set()
        self._kept: Counter[SlotId] = Counter()

    def unchecked(self, slots: Iterable[SlotId]) -> tuple[SlotId, ...]:
        """Return those on which nothing may be promised yet, in the same order. Reads only."""
        return tuple([slot for slot in slots if slot not in self._checked]) if self.is_needed else ()

    def not_being_read(self, slots: Iterable[SlotId]) -> tuple[SlotId, ...]:
        """Return those that no open check reads, in the same order. Reads only."""
        return tuple([slot for slot in slots if slot not in self._reading])

    def begun(self, slots: Iterable[SlotId]) -> None:
        """A check is to read these slots, which none reads yet."""
        self._reading.update(slots)

    def ended(self, slots: Iterable[SlotId], good: Iterable[SlotId]) -> None:
        """A check is over; of its slots these are as they were stored."""
        self._reading.difference_update(slots)
        self.passed(good)

    def passed(self, slots: Iterable[SlotId]) -> None:
        """These slots are as they were stored. It counts for those that a hit keeps."""
        self._checked.update(slot for slot in slots if slot in self._kept)

    def keep(self, slots: Iterable[SlotId]) -> None:
        """A hit pins these slots from now on."""
        if self.is_needed:
            self._kept.update(slots)

    def let_go(self, slots: Collection[SlotId]) -> None:
        """A hit does not pin these slots any longer."""
        if self.is_needed:
            self._kept.subtract(slots)
            gone = [slot for slot in slots if not self._kept[slot]]
            for slot in gone:
                del self._kept[slot]
            self._checked.difference_update(gone)

    def checked(self) -> frozenset[SlotId]:
        """Return the slots that count as checked."""
        return frozenset(self._checked)

    def being_read(self) -> frozenset[SlotId]:
        """Return the slots of open checks."""
        return frozenset(self._reading)
