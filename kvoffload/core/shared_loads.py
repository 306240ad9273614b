"""Shared loads (R14): many requests with one prefix that is on the host load it once; the others wait.

A slot has an owner from the allocation that made its load binding until that request runs (the device's own prefix
cache then has the blocks), fails, or is gone. The wait is bounded from outside: a lookup that may not wait any longer
is not told of owners.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.model.ids import RequestId, SlotId


class SharedLoads:
    """Who is loading which slots."""

    def __init__(self) -> None:
        self._owner: dict[SlotId, RequestId] = {}
        self._slots: dict[RequestId, tuple[SlotId, ...]] = {}

    def started(self, request: RequestId, slots: Iterable[SlotId]) -> None:
        """A request's load of these slots became binding. A slot keeps its first owner."""
        mine = tuple(slot for slot in slots if self._owner.setdefault(slot, request) == request)
        if mine:
            self._slots[request] = mine

    def owner(self, slots: Iterable[SlotId], asking: RequestId) -> RequestId | None:
        """Return another request that is loading one of these slots, None without one. Reads only."""
        if not self._owner:
            return None
        for slot in slots:
            owner = self._owner.get(slot)
            if owner is not None and owner != asking:
                return owner
        return None

    def ended(self, request: RequestId) -> None:
        """The request runs, failed, or is gone. Harmless for one that owns nothing."""
        for slot in self._slots.pop(request, ()):
            del self._owner[slot]

    def forget_all(self) -> None:
        """A reset: what is being loaded is not to be found, so nobody waits for it."""
        self._owner.clear()
        self._slots.clear()

    def owners(self) -> tuple[RequestId, ...]:
        """Return the requests that own slots. Reads only."""
        return tuple(self._slots)
