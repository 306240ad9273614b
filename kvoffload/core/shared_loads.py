"""Shared loads (R14): many requests with one prefix that is on the host load it once; the others wait.

A request owns the slots it loads from the allocation that made its load binding until it runs (the device's own prefix
cache then has the blocks), fails, or is gone. A slot may have several owners, as one whose patience ended loads it too.
The wait is bounded from outside: a lookup that may not wait any longer is not told of owners.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.model.ids import RequestId, SlotId


class SharedLoads:
    """Who is loading which slots."""

    def __init__(self) -> None:
        self._owners: dict[SlotId, list[RequestId]] = {}
        self._slots: dict[RequestId, tuple[SlotId, ...]] = {}

    def started(self, request: RequestId, slots: Iterable[SlotId]) -> None:
        """A request's load of these slots became binding."""
        mine = self._slots[request] = tuple(slots)
        for slot in mine:
            self._owners.setdefault(slot, []).append(request)

    def owner(self, slots: Iterable[SlotId]) -> RequestId | None:
        """Return the first request that is loading one of these slots, None without one. Reads only.

        Never the one that asks: whoever owns slots has a block table, and only who has none is looked up.
        """
        if not self._owners:
            return None
        owners = self._owners.get
        return next((found[0] for slot in slots if (found := owners(slot))), None)

    def ended(self, request: RequestId) -> None:
        """The request runs, failed, or is gone. Harmless for one that owns nothing."""
        for slot in self._slots.pop(request, ()):
            owners = self._owners[slot]
            owners.remove(request)
            if not owners:
                del self._owners[slot]

    def forget_all(self) -> None:
        """A reset: what is being loaded is not to be found, so nobody waits for it."""
        self._owners.clear()
        self._slots.clear()

    def owners(self) -> tuple[RequestId, ...]:
        """Return the requests that own slots. Reads only."""
        return tuple(self._slots)
