"""Which running requests offer a block again if the host evicts it."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.core.claims import Claims
from kvoffload.core.jobs import Offer
from kvoffload.core.request import RequestRecord, Watch
from kvoffload.model.ids import BlockKey


class EvictionWatch:
    """Makes running requests offer a block again after the host has evicted it (R8).

    A request does not store a block that the host already has. If the host evicts the block while the request runs, the
    request offers the block again, but only once.

    Requests with the same prefix offer the same keys, so they share one `Watch`, which costs each of them one entry
    instead of one per block. The only writer of `RequestRecord.watched` and `stored_again`.
    """

    def __init__(self) -> None:
        self.watches = Claims[BlockKey, Watch]()
        """For each watched key, the watches that contain the key."""
        self._open: dict[tuple[BlockKey, ...], Watch] = {}
        """The watches that further requests may join, by their keys."""

    def add(self, record: RequestRecord, offer: Offer) -> None:
        """Remember a request's offer in case the host evicts its keys, except for keys already offered again."""
        if record.stored_again:
            offer = offer.part([key not in record.stored_again for key in offer.keys])
        if not offer.keys:
            return
        keys = tuple(offer.keys)
        watch = self._open.get(keys)
        if watch is None:
            watch = self._open[keys] = Watch(keys)
            self.watches.add(keys, watch)
        if record not in watch.offers:
            record.watched.append(watch)
        watch.offers[record] = offer

    def evicted(self, keys: Iterable[BlockKey]) -> list[Offer]:
        """Return the remembered offers of keys that the host has evicted, and forget them."""
        again: list[Offer] = []
        for key in keys:
            for watch in self.watches.pop(key):
                self._close(watch)
                watch.places = watch.places or {each: place for place, each in enumerate(watch.keys)}
                for record, offer in watch.offers.items():
                    record.stored_again.add(key)
                    again.append(offer.one(watch.places[key]))
        return again

    def forget(self, record: RequestRecord) -> None:
        """Forget the offers of a request that has lost its block table."""
        for watch in record.watched:
            del watch.offers[record]
            if not watch.offers:
                self._drop(watch)
        record.watched.clear()

    def _drop(self, watch: Watch) -> None:
        """Forget a watch that no request needs any more."""
        self._close(watch)
        self.watches.remove(watch.keys, watch)

    def _close(self, watch: Watch) -> None:
        """Let no further request join a watch, because it lacks a key, or because no request needs it."""
        if watch.is_open:
            watch.is_open = False
            del self._open[watch.keys]
