"""Shared loads (R14): requests with one prefix that is on the host load it once; the others wait.

A request owns the slots that it loads from its allocation until it runs (the device's own prefix cache then has the
blocks), fails, or is gone. A slot may have several owners, because a request whose patience ended loads it too. The
runtime bounds the wait: a lookup that may not wait any longer ignores owners.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.core.request import RequestRecord
from kvoffload.model.ids import RequestId, SlotId


class SharedLoads:
    """The only writer of `RequestRecord.loading`, and of the index by slot."""

    def __init__(self) -> None:
        self.owners: dict[SlotId, list[RequestRecord]] = {}

    def started(self, record: RequestRecord, slots: Iterable[SlotId]) -> None:
        """A request's load of these slots became binding."""
        record.loading = tuple(slots)
        for slot in record.loading:
            self.owners.setdefault(slot, []).append(record)

    def owner(self, slots: Iterable[SlotId]) -> RequestId | None:
        """Return the first request that is loading one of these slots, None without one. Reads only.

        It is never the request that asks: an owner has a block table, and only requests without one look up.
        """
        owners = self.owners.get
        return next((found[0].request for slot in slots if (found := owners(slot))), None)

    def ended(self, record: RequestRecord) -> None:
        """The request runs, failed, or is gone. Harmless for a request that owns nothing."""
        slots, record.loading = record.loading, ()
        for slot in slots:
            owners = self.owners[slot]
            owners.remove(record)
            if not owners:
                del self.owners[slot]
