"""A handle on slots that must stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvoffload.model.errors import ClosedTwice
from kvoffload.model.ids import SlotId


class Pinned(Protocol):
    """Whose slots they are."""

    def unpin(self, slots: Sequence[SlotId]) -> None:
        """Undo one pin of each. For `Pins` alone, which does so once."""


class Pins:
    """Keeps slots from eviction until it is closed, exactly once."""

    __slots__ = ("_pool", "closed", "slots")

    def __init__(self, pool: Pinned, slots: tuple[SlotId, ...]) -> None:
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
        self._pool.unpin(self.slots)

    def __repr__(self) -> str:
        return f"<Pins {len(self.slots)} slots{' closed' if self.closed else ''}>"
