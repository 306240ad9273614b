"""Pending hits (R1): what a request's last lookup found, pinned until something consumes or drops it."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.core.checked_slots import CheckedSlots
from kvoffload.core.pins import Pins
from kvoffload.model.causes import MissCause
from kvoffload.model.ids import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class PendingHit:
    """One lookup's answer.

    Args:
        device_tokens: tokens that the device held.
        tokens: tokens that device and host hold together.
        pins: keeps the slots that were found, heads first; None where nothing was found.
        cause: why the first block position behind `tokens` missed; None where nothing missed.
    """

    device_tokens: int
    tokens: int
    pins: Pins | None
    cause: MissCause | None

    @property
    def blocks(self) -> int:
        return len(self.pins.slots) if self.pins else 0


class PendingHits:
    """The only holder of hits that are not yet a load. At most one a request.

    Args:
        checked: hears which slots hits keep.
    """

    def __init__(self, checked: CheckedSlots) -> None:
        self._hits: dict[RequestId, PendingHit] = {}
        self._checked = checked

    def put(self, request: RequestId, hit: PendingHit) -> None:
        """Keep a lookup's answer. The one before must have been taken."""
        assert request not in self._hits, request
        self._hits[request] = hit
        if hit.pins is not None:
            self._checked.keep(hit.pins.slots)

    def take(self, request: RequestId) -> PendingHit | None:
        """Hand a request's hit over, pins and all, None without one; the caller closes the pins."""
        hit = self._hits.pop(request, None)
        if hit is not None and hit.pins is not None:
            self._checked.let_go(hit.pins.slots)
        return hit

    def all(self) -> dict[RequestId, PendingHit]:
        """Return the pending hits. Reads only."""
        return dict(self._hits)
