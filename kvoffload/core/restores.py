"""Restores (R8): eviction is news to a running request whose device blocks the host no longer has."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.core.offers import Offer
from kvoffload.model.ids import BlockKey, RequestId


class Restores:
    """Offers that were declined because the host had the key; they are made again when it is evicted."""

    def __init__(self) -> None:
        self._watchers: dict[BlockKey, dict[RequestId, Offer]] = {}
        self._keys: dict[RequestId, set[BlockKey]] = {}

    def watch(self, offer: Offer) -> None:
        """A running request's block is on the host by another's doing."""
        assert offer.request is not None, offer
        self._watchers.setdefault(offer.key, {})[offer.request] = offer
        self._keys.setdefault(offer.request, set()).add(offer.key)

    def evicted(self, keys: Iterable[BlockKey]) -> list[Offer]:
        """These keys left the host: return the offers to be made again, each once."""
        again: list[Offer] = []
        for key in keys:
            if key not in self._watchers:
                continue
            for request, offer in self._watchers.pop(key).items():
                self._keys[request].discard(key)
                again.append(offer)
        return again

    def forget(self, request: RequestId) -> None:
        """The request gave its table up."""
        for key in self._keys.pop(request, ()):
            watchers = self._watchers[key]
            del watchers[request]
            if not watchers:
                del self._watchers[key]

    def forget_all(self) -> None:
        """A reset: what was on the host is gone for a reason that concerns everyone."""
        self._watchers.clear()
        self._keys.clear()

    def watched(self) -> dict[RequestId, frozenset[BlockKey]]:
        """Return what each request watches. Reads only."""
        return {request: frozenset(keys) for request, keys in self._keys.items() if keys}
