"""The store desk: which offers are stored, the step's store job, and how store jobs end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from kvoffload.core.jobs import Job
from kvoffload.core.offer_book import OfferBook
from kvoffload.core.offers import Offer
from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.states import JobEvent
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.events import StoreScheduled
from kvoffload.model.ids import NULL_BLOCK, BlockKey, RequestId, SlotId
from kvoffload.model.transfer import Direction


class Wait(Enum):
    """Why an offer has no outcome yet."""

    FOR_ROOM = "for_room"  # under the lease limit; tried again next step
    FOR_MEMORY = "for_memory"  # the host has no room, and more memory is being made ready
    FOR_COPIES = "for_copies"  # too many copies did not end, and no new one is begun
    FOR_END = "for_end"  # the host is full of what running requests use; tried again at the request's end
    FOR_TWIN = "for_twin"  # another block with the same key is on its way
    FOR_COPY = "for_copy"  # a copy that was given up still reads the block; tried again at the request's end


class StoreDesk:
    """Accepts or declines offers. One job a step takes what is accepted."""

    def __init__(self, state: CoreState, book: OfferBook) -> None:
        self._state = state
        self._book = book
        self._batch: Job | None = None
        self.leased_blocks = 0

    # -- offers -------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Device blocks that stores may lease now."""
        return 0 if self._state.stall.is_on else self._state.shape.lease_limit - self.leased_blocks

    @property
    def _room_for_deferred(self) -> int:
        """Offers worth deciding on again: with more memory on its way, those that have no slot yet wait on."""
        return min(self.room, self._state.pool.room) if self._state.growing else self.room

    def offer(self, offers: Iterable[Offer], *, last_chance: bool = False) -> None:
        """Take offers in, each for the first time. `last_chance`: their request is ending, so nothing can wait."""
        offers = tuple(offers)
        self._state.outbox.offered(len(offers))
        self._decide(offers, last_chance=last_chance)

    def retry(self, record: RequestRecord) -> None:
        """A request is ending: what it has waiting gets its last chance."""
        if record.unsettled:
            self._decide(self._book.take_unsettled(record), last_chance=True)

    def next_step(self) -> None:
        """A step has come: decide on what waited for room and on what may be stored again."""
        if self._book.is_idle:
            return
        self._decide(self._book.take_again(), last_chance=False)
        self._decide(self._book.take_deferred(self._room_for_deferred), last_chance=False)

    def refuse(self, offers: Sequence[Offer], outcome: StoreOutcome) -> None:
        """Blocks that were due but cannot be stored: their outcome is known at once."""
        self._state.outbox.offered(len(offers))
        for offer in offers:
            self._book.settle(offer.key, outcome)

    def lost_table(self, record: RequestRecord) -> None:
        """A request lost its blocks before these could be stored."""
        self._book.settle_unsettled(record, StoreOutcome.LOST)

    @property
    def planned(self) -> Sequence[Job]:
        """The step's store job, if there is one. Reads only."""
        return () if self._batch is None else (self._batch,)

    def submit(self) -> None:
        """Hand the step's store job over, if there is one."""
        job, self._batch = self._batch, None
        if job is not None:
            self._state.outbox.put(StoreScheduled(job.job, len(job.slots), tuple(job.slots)))
            self._state.jobs.submit((job,))

    # -- deciding -----------------------------------------------------------------------------------------------

    def _decide(self, offers: Iterable[Offer], *, last_chance: bool) -> None:
        accepted: dict[BlockKey, Offer] = {}
        twins: list[Offer] = []
        cached: list[Offer] = []
        host_room, lease_room = self._state.pool.room, self.room
        for offer in offers:
            if offer.key in accepted:
                twins.append(offer)
                continue
            verdict = self._judge(offer, host_room - len(accepted), lease_room - len(accepted))
            if isinstance(verdict, Offer):
                accepted[offer.key] = verdict
            elif verdict is StoreOutcome.ALREADY_CACHED:
                cached.append(offer)
            else:
                self._decline(offer, verdict, last_chance=last_chance)
        for offer in reversed(cached):  # used together: the head is to be evicted last (R15)
            self._book.already_cached(offer)
        if accepted:
            self._accept(tuple(accepted.values()))
        for twin in twins:
            self._state.stores.wait(twin)

    def _judge(self, offer: Offer, host_room: int, lease_room: int) -> Offer | Wait | StoreOutcome:
        """Return the offer to accept, what it waits for, or why it is not stored."""
        state = self._state
        if state.degraded:
            return StoreOutcome.DEGRADED
        if offer.key in state.pool.index:
            return StoreOutcome.ALREADY_CACHED
        if offer.key in state.stores.keys:
            return Wait.FOR_TWIN
        verdict = self._by_block(offer)
        if not isinstance(verdict, Offer):
            return verdict
        if host_room < 1:
            return Wait.FOR_MEMORY if state.growing else Wait.FOR_END
        if lease_room > 0:
            return verdict
        return Wait.FOR_COPIES if state.stall.is_on else Wait.FOR_ROOM

    def _by_block(self, offer: Offer) -> Offer | Wait | StoreOutcome:
        """Return the offer on a block that certainly holds its key; or why there is none (R3, R7, R10)."""
        state, block = self._state, offer.block
        if block == NULL_BLOCK:
            # Zeroed, but another block on the device may hold the key.
            block = state.device.block_of(offer.key) or NULL_BLOCK
            if block == NULL_BLOCK:
                return StoreOutcome.STALE
        if state.generation and not self._since_reset(offer, block):
            return StoreOutcome.BEFORE_RESET
        if block in state.stores.blocks:
            return Wait.FOR_COPY
        held = state.device.key_of(block)
        if held != offer.key:
            return StoreOutcome.NOT_HASHED if held is None else StoreOutcome.STALE
        return offer if block == offer.block else offer._replace(block=block)

    def _since_reset(self, offer: Offer, block: int) -> bool:
        """Whether a block was computed after the last reset, all that it builds on included (R10)."""
        state = self._state
        record = state.requests.live(offer.request) if offer.request is not None else None
        return block in state.computed_since_reset and (record is None or record.stores)

    def _decline(self, offer: Offer, verdict: Wait | StoreOutcome, *, last_chance: bool) -> None:
        if isinstance(verdict, StoreOutcome):
            self._book.settle(offer.key, verdict)
        elif verdict is Wait.FOR_TWIN:
            self._state.stores.wait(offer)
        elif last_chance or (record := self._book.record(offer)) is None:
            self._book.settle(offer.key, _LAST_WORDS[verdict])
        elif verdict in _FOR_ROOM:
            self._book.wait_for_room(record, offer, _MEANWHILE.get(verdict))
        else:
            self._book.wait_for_end(record, offer, _MEANWHILE[verdict])

    def _accept(self, offers: tuple[Offer, ...]) -> None:
        """Give offers slots and leases and put them into the step's job. There is room for all of them."""
        state = self._state
        if self._batch is None:
            self._batch = state.jobs.plan(Direction.STORE, state.leases.open())
        job = self._batch
        slots, evicted = state.pool.reserve([offer.key for offer in offers])
        self._book.evicted(evicted)
        blocks = [offer.block for offer in offers]
        job.lease.add(blocks)
        self.leased_blocks += len(blocks)
        job.slots += slots
        job.blocks += blocks
        job.offers += offers
        state.stores.accepted(job.job, offers)
        known = set(job.concerns)
        for request, incarnation in dict.fromkeys([(offer.request, offer.incarnation) for offer in offers]):
            record = state.requests.incarnation(request, incarnation) if request is not None else None
            if record is not None and record not in known:
                job.concerns.append(record)
                state.requests.job_opened(record)

    # -- endings ------------------------------------------------------------------------------------------------

    def arrived(self, job: Job) -> None:
        """Every rank has copied: the blocks can hit. The deepest become evictable first."""
        state = self._state
        slots: dict[tuple[RequestId | None, int], list[SlotId]] = {}
        for offer, slot in zip(job.offers, job.slots, strict=True):
            slots.setdefault((offer.request, offer.incarnation), []).append(slot)
        records: dict[RequestId | None, RequestRecord] = {record.request: record for record in job.concerns}
        for (request, incarnation), stored in slots.items():
            if (record := records.get(request)) is not None:
                record.shares |= record.incarnation != incarnation
                state.holds.add(record, stored)
        state.pool.fill(job.slots[::-1])
        keys = [offer.key for offer in job.offers]
        state.misses.arrived(keys)
        for twin in state.stores.settled(keys):
            state.outbox.settled(StoreOutcome.IN_FLIGHT)
            self._book.watch(twin)
        state.outbox.settled(StoreOutcome.STORED, len(job.offers))
        job.settled = True

    def failed(self, job: Job, outcome: StoreOutcome) -> None:
        """The blocks will not come: their slots are worthless at once, and whoever waited for them may try."""
        job.settled = True
        for slot in job.slots:
            self._state.pool.doom(slot)
        keys = [offer.key for offer in job.offers]
        for key in keys:
            self._book.settle(key, outcome)
        self._book.again(self._state.stores.settled(keys))

    def copies_ended(self, job: Job) -> None:
        """No rank touches the job's memory any more: give it back."""
        state = self._state
        state.pool.drained(job.slots)
        state.stores.ended(job.blocks)
        self.leased_blocks -= len(job.blocks)
        job.lease.close()
        for record in job.concerns:
            state.requests.job_ended(record)
            state.holds.let_go_if_over(record)

    def stop(self, outcome: StoreOutcome, planned: StoreOutcome) -> None:
        """Nothing that is on its way or waits may be found later: settle it all, the step's own job as `planned`."""
        batch, self._batch = self._batch, None
        for job in self._state.jobs.all():
            if job.direction is Direction.STORE and not job.settled:
                self.failed(job, planned if job is batch else outcome)
        if batch is not None:
            self._state.jobs.move(batch, JobEvent.CANCEL)
            self.copies_ended(batch)
        self._book.settle_all(outcome)


_LAST_WORDS = {
    Wait.FOR_ROOM: StoreOutcome.LEASE_LIMIT,
    Wait.FOR_END: StoreOutcome.HOST_FULL,
    Wait.FOR_MEMORY: StoreOutcome.NOT_READY,
    Wait.FOR_COPIES: StoreOutcome.STALLED,
    Wait.FOR_COPY: StoreOutcome.FAILED,
}
"""The outcome of an offer that could only have waited."""

_FOR_ROOM = (Wait.FOR_ROOM, Wait.FOR_MEMORY, Wait.FOR_COPIES)
"""What is over for all waiting offers at once, so that they are decided on in order, as many as there is room for."""

_MEANWHILE = {
    Wait.FOR_MEMORY: MissCause.DECLINED_NOT_READY,
    Wait.FOR_COPIES: MissCause.DECLINED_STALLED,
    Wait.FOR_END: MissCause.DECLINED_HOST_FULL,
    Wait.FOR_COPY: MissCause.STORE_FAILED,
}
"""Why the key of a waiting offer misses until then."""
