"""The offer book: every offer gets exactly one outcome, and until then it is known where it waits.

An offer may wait in its request's `unsettled` set (for room under the lease limit, then it is also in the `deferred`
queue; or for the request's end), with `InFlightStores` for another block that has the same key, in `again` for the
next step, or in an open job.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from kvoffload.core.offers import Offer
from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.model.causes import EvictionCause, MissCause, StoreOutcome
from kvoffload.model.ids import NULL_BLOCK, BlockKey, GroupId, RequestId

_Place = tuple[GroupId, int]

_MISS_CAUSES = {
    StoreOutcome.HOST_FULL: MissCause.DECLINED_HOST_FULL,
    StoreOutcome.STALLED: MissCause.DECLINED_STALLED,
    StoreOutcome.NOT_READY: MissCause.DECLINED_NOT_READY,
    StoreOutcome.STALE: MissCause.DECLINED_STALE,
    StoreOutcome.LEASE_LIMIT: MissCause.DECLINED_LEASE_LIMIT,
    StoreOutcome.NOT_HASHED: MissCause.DECLINED_OTHER,
    StoreOutcome.DEGRADED: MissCause.DECLINED_OTHER,
    StoreOutcome.LOST: MissCause.LOST,
    StoreOutcome.REQUEST_GONE: MissCause.LOST,
    StoreOutcome.FAILED: MissCause.STORE_FAILED,
    StoreOutcome.ABANDONED: MissCause.STORE_FAILED,
    StoreOutcome.BEFORE_RESET: MissCause.AFTER_RESET,
    StoreOutcome.CANCELLED: MissCause.AFTER_RESET,
}
"""What a later lookup says of a block that was not stored."""


class OfferBook:
    """Keeps offers that wait, and settles them."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._deferred: OrderedDict[RequestId, deque[_Place]] = OrderedDict()
        self._again: list[Offer] = []

    # -- waiting ------------------------------------------------------------------------------------------------

    def again(self, offers: Iterable[Offer]) -> None:
        """These may be stored after all: decide in the next step."""
        self._again += offers

    def take_again(self) -> list[Offer]:
        """Hand over the offers to decide on again."""
        again, self._again = self._again, []
        return again

    def wait_for_room(self, record: RequestRecord, offer: Offer, cause: MissCause | None = None) -> None:
        """An offer waits for room, at most until its request's end; until then its key misses for the cause, if any."""
        if cause is not None:
            self._state.misses.note((offer.key,), cause)
        place = (offer.group, offer.position)
        record.unsettled.add(place)
        self._deferred.setdefault(record.request, deque()).append(place)

    def wait_for_end(self, record: RequestRecord, offer: Offer, cause: MissCause) -> None:
        """An offer waits for its request's end; until then its key misses for this cause."""
        record.unsettled.add((offer.group, offer.position))
        self._state.misses.note((offer.key,), cause)

    def take_deferred(self, room: int) -> list[Offer]:
        """Hand over up to `room` offers that waited for room, as their tables have them now."""
        taken: list[Offer] = []
        while self._deferred and len(taken) < room:
            request, places = next(iter(self._deferred.items()))
            record = self._state.requests.live(request)
            assert record is not None, request
            while places and len(taken) < room:
                place = places.popleft()
                record.unsettled.discard(place)
                taken.append(self._remake(record, *place))
            if not places:
                del self._deferred[request]
        return taken

    def take_unsettled(self, record: RequestRecord) -> list[Offer]:
        """Hand over all that a request has waiting, the head of its prefix first."""
        tokens = [group.block_tokens for group in self._state.shape.groups]
        places = sorted(record.unsettled, key=lambda place: place[1] * tokens[place[0]])
        self._forget(record)
        return [self._remake(record, *place) for place in places]

    # -- outcomes -----------------------------------------------------------------------------------------------

    def settle(self, key: BlockKey, outcome: StoreOutcome) -> None:
        """An offer has its outcome."""
        self._state.outbox.settled(outcome)
        cause = _MISS_CAUSES.get(outcome)
        if cause is not None and key not in self._state.pool.index:
            self._state.misses.note((key,), cause)

    def settle_unsettled(self, record: RequestRecord, outcome: StoreOutcome) -> None:
        """A request's waiting offers can wait no longer."""
        if not record.unsettled:
            return  # most have none
        for group, position in record.unsettled:
            self.settle(record.keys[group][position], outcome)
        self._forget(record)

    def already_cached(self, offer: Offer) -> None:
        """The host has the offer's key: note the use, and watch for its eviction (R8).

        A request's blocks are confirmed, and offered, a few at a time. Touched so, their head would be the oldest (R15):
        they are touched together, when the request lets go of what it holds.
        """
        if self.record(offer) is None:
            self._state.pool.touch(self._state.pool.index[offer.key])
        self._state.outbox.settled(StoreOutcome.ALREADY_CACHED)
        self.watch(offer)

    def watch(self, offer: Offer) -> None:
        """A running request's block is on the host by another's doing: it may come back if it is evicted.

        Once a request, or a pool that is too small would churn.
        """
        record = self.record(offer)
        if record is None:
            return
        record.shares = True
        if offer.key not in record.restored:
            self._state.restores.watch(offer)

    def evicted(self, keys: tuple[BlockKey, ...]) -> None:
        """Blocks made room for others. What running requests still have on the device may come back, once."""
        if not keys:
            return
        self._state.misses.note(keys, MissCause.EVICTED)
        self._state.outbox.evicted(EvictionCause.SPACE, len(keys))
        again = self._state.restores.evicted(keys)
        for offer in again:
            record = self.record(offer)
            assert record is not None, offer  # a request that gives its table up watches nothing any more
            record.restored.add(offer.key)
        self._state.outbox.offered(len(again))
        self._again += again

    def settle_all(self, outcome: StoreOutcome) -> None:
        """Nothing that waits may be stored any longer."""
        for record in self._state.requests.all_live():
            self.settle_unsettled(record, outcome)
        for offer in self.take_again():
            self.settle(offer.key, outcome)

    # -- questions ----------------------------------------------------------------------------------------------

    def record(self, offer: Offer) -> RequestRecord | None:
        """Return the offering request if it still has the table that the offer speaks of. Reads only."""
        if offer.request is None:
            return None
        return self._state.requests.incarnation(offer.request, offer.incarnation)

    @property
    def has_again(self) -> bool:
        """Whether the next step has offers to decide on again."""
        return bool(self._again)

    @property
    def is_idle(self) -> bool:
        """Whether the next step has nothing to decide on."""
        return not (self._again or self._deferred)

    def waiting(self) -> int:
        """Return how many offers have no outcome and are in no job. Reads only."""
        unsettled = sum(len(record.unsettled) for record in self._state.requests.all_live())
        twins = sum(map(len, self._state.stores.waiting().values()))
        return unsettled + twins + len(self._again)

    def problems(self) -> list[str]:
        """Return where what waits for room and what waits at all disagree. Reads only."""
        waiting = {(request, place) for request, places in self._deferred.items() for place in places}
        unsettled = {
            (record.request, place)
            for record in self._state.requests.all_live()
            for place in record.unsettled
        }
        return [
            f"{request} waits for room at {place} but is settled" for request, place in waiting - unsettled
        ]

    # -- inside -------------------------------------------------------------------------------------------------

    def _forget(self, record: RequestRecord) -> None:
        record.unsettled.clear()
        self._deferred.pop(record.request, None)

    def _remake(self, record: RequestRecord, group: GroupId, position: int) -> Offer:
        """Return the offer of a place as the request's table has it now: its block may have been zeroed."""
        table = self._state.tables.table(record.request)
        assert table is not None, record.request
        block = table[group][position] if position < len(table[group]) else NULL_BLOCK
        key = record.keys[group][position]
        return Offer(key, block, record.request, record.incarnation, group, position)
