"""Which running requests offer a block again when the host evicts it (R8).

A request whose block was on the host by another request's store has nothing to store. Should the host evict the block
while the request still runs, it offers the block again, once.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.core.job import Offer
from kvoffload.core.request import RequestRecord
from kvoffload.model.ids import BlockKey


class EvictionWatch:
    """The only writer of `RequestRecord.watched` and `stored_again`, and of the index by key."""

    def __init__(self) -> None:
        self.offers: dict[BlockKey, dict[RequestRecord, Offer]] = {}

    def add(self, record: RequestRecord, offer: Offer) -> None:
        """Watch for the eviction of a key that a request offered, unless the request has offered it again before."""
        if offer.key not in record.stored_again:
            self.offers.setdefault(offer.key, {})[record] = offer
            record.watched.add(offer.key)

    def evicted(self, keys: Iterable[BlockKey]) -> list[Offer]:
        """These keys left the host: return the offers to make again."""
        again: list[Offer] = []
        for key in keys:
            for record, offer in self.offers.pop(key, {}).items():
                record.watched.discard(key)
                record.stored_again.add(key)
                again.append(offer)
        return again

    def forget(self, record: RequestRecord) -> None:
        """The request has no block table any more."""
        for key in record.watched:
            offers = self.offers[key]
            del offers[record]
            if not offers:
                del self.offers[key]
        record.watched.clear()
