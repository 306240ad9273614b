"""The words that vLLM has for each tier, in its events, its requests' limits and its statistics."""

from __future__ import annotations

from typing import NamedTuple

from kvoffload.model.wire import Tier


class Place(NamedTuple):
    """A tier in vLLM's words.

    Args:
        medium: what holds the blocks.
        locality: LOCAL means the machine of the engine.
        source: the value of vLLM's `CacheHitSource` for hits on this tier.
    """

    medium: str
    locality: str
    source: str

    @property
    def where(self) -> dict[str, str]:
        """Return the fields of an event."""
        return {"medium": self.medium, "locality": self.locality}


PLACES = {
    Tier.HOST: Place("CPU", "LOCAL", "host"),
    Tier.NODE: Place("CPU", "LOCAL", "p2p"),
    Tier.DISK: Place("STORAGE", "LOCAL", "disk"),
    Tier.REMOTE: Place("STORAGE", "REMOTE", "external_unspecified"),  # vLLM has no source for a remote tier
}
