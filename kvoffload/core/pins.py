"""A handle on slots that must stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.model.errors import ClosedTwice
from kvoffload.model.ids import SlotId

if TYPE_CHECKING:
    from kvoffload.core.host_pool import HostPool


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
