"""Stores: planners offer computed blocks, and one job per step copies the blocks of accepted offers.

    offer ─▶ _decide ─▶ _accept ─▶ the step's job ─▶ reported ─▶ _arrived │ failed
                │  ▲
                │  └── waiting: for room under the lease limit, for the request's end, for the store of a duplicate
                └─ declined (`_settle`)

Every offered block gets exactly one outcome. Until then it is in `RequestRecord.waiting`, among the duplicates of
`InFlight`, in `again` for the next step, or in an open job. An offer has all blocks that a request offers at a time, in
columns. Only blocks that cannot all be accepted are decided on one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, compress, islice
from operator import not_

from kvoffload.core.eviction_watch import EvictionWatch
from kvoffload.core.jobs import Failure, Offer, Store, blocks_of, joined, keys_of, owner, singles, some
from kvoffload.core.machine import RequestState
from kvoffload.core.request import Position, RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.model.causes import CopyOutcome, MissCause, StoreOutcome
from kvoffload.model.events import StatesCopied, StoreScheduled
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId, GroupId, Rank
from kvoffload.model.wire import Direction, JobReport

_STORED, _ALREADY_CACHED = StoreOutcome.STORED, StoreOutcome.ALREADY_CACHED
_FINISHING = RequestState.FINISHING


class Stores:
    """Decides on offers, and owns store jobs."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._lease_limit = state.shape.lease_limit
        self.in_flight = state.in_flight
        self.evictions = EvictionWatch()
        self.batch: Store | None = None
        """The step's job, to which accepted offers are added; None before the step's first accepted offer."""
        self.for_room: dict[RequestRecord, deque[Position]] = {}
        """For each request, the positions whose offers wait for room."""
        self.states_for_room: dict[RequestRecord, deque[Position]] = {}
        """Like `for_room`, but for recurrent states, which get room first: a prefix without its state is useless."""
        self.again: list[Offer] = []
        """Offers to decide on again in the next step, each of a single block."""
        self.leased_blocks = 0
        """The number of device blocks that open stores lease."""

    # -- offers -------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Return the number of device blocks that stores may still lease."""
        return 0 if self._state.stall.is_on else self._lease_limit - self.leased_blocks

    def offer(self, offers: Sequence[Offer], *, last_chance: bool = False) -> None:
        """Decide on new offers. With `last_chance`, the request is ending, so that none of its offers can wait."""
        if offers:
            keys = keys_of(offers)
            self._state.tally.offered(len(keys))
            self._decide(offers, keys, last_chance=last_chance)

    def offer_tails(self, offers: Sequence[Offer]) -> None:
        """Decide on offers of the blocks of tails, whose keys the caller has compared with the engine's own hashes.

        The key of an attention block in a tail differs from the engine's hash once the block is whole. The offers name no
        request, and none of them waits.
        """
        self._state.tally.offered(len(keys_of(offers)) if offers else 0)
        fresh = self._fresh(offers)
        self._admit_some(fresh, keys_of(fresh) if fresh else (), last_chance=True)

    def refuse(self, offers: Sequence[Offer], outcome: StoreOutcome) -> None:
        """Count an offer with this outcome for each block that cannot be stored."""
        keys = keys_of(offers) if offers else ()
        if keys:
            self._state.tally.offered(len(keys))
            self._settle(keys, outcome)

    def within(self, limit_tokens: int, offers: Sequence[Offer], outcome: StoreOutcome) -> list[Offer]:
        """Return the offers of blocks within a request's limit. Refuse the others, unless the host has their blocks."""
        groups, index = self._state.shape.groups, self._state.pool.index
        allowed: list[Offer] = []
        excluded: list[Offer] = []
        for offer in offers:
            places = [divmod(place, len(groups)) for place in offer.places]
            is_within = [
                (position + 1) * groups[group].block_tokens <= limit_tokens for position, group in places
            ]
            allowed.append(offer.part(is_within))
            beyond = zip(offer.keys, is_within, strict=True)
            excluded.append(offer.part([not (fits or key in index) for key, fits in beyond]))
        self.refuse(some(excluded), outcome)
        return some(allowed)

    def offer_again(self, offers: Sequence[Offer]) -> None:
        """Defer offers that waited for a failed job to the next step."""
        self.again += offers

    def arrived_otherwise(self, offers: Sequence[Offer]) -> None:
        """Settle offers whose keys another job has copied to the host."""
        if offers:
            self._state.tally.count_stores(StoreOutcome.IN_FLIGHT, len(offers))
            self._share(joined(offers))

    def next_step(self) -> None:
        """Decide on the offers in `again`, then on as many offers that wait for room as there is room for."""
        if self.again:
            again, self.again = self.again, []
            self._decide(again, keys_of(again), last_chance=False)
        if self.for_room or self.states_for_room:
            # While host memory grows, an offer without a slot keeps waiting instead of being declined.
            room = min(self.room, self._state.pool.room) if self._state.growing else self.room
            if waited := self._take_for_room(room):
                self._decide(waited, keys_of(waited), last_chance=False)

    def ending(self, record: RequestRecord) -> None:
        """Decide for the last time on the waiting offers of a request that is ending."""
        if not record.waiting:
            return
        sizes = [group.block_tokens for group in self._state.shape.groups]
        # Heads come first, as in every list of a request's blocks.
        positions = sorted(record.waiting, key=lambda position: position[1] * sizes[position[0]])
        self._stop_waiting(record)
        waited = [self._offer_of(record, *position) for position in positions]
        self._decide(waited, keys_of(waited), last_chance=True)

    def settle_waiting(self, record: RequestRecord, outcome: StoreOutcome) -> None:
        self._settle([record.keys[group][position] for group, position in record.waiting], outcome)
        self._stop_waiting(record)

    def schedule(self, job: Store) -> None:
        """Report the step's store job just before it is submitted. Later offers go into a new job."""
        self.batch = None
        self._state.tally.events.append(StoreScheduled(job.id, len(job.slots)))

    # -- deciding -----------------------------------------------------------------------------------------------

    def _decide(self, offers: Sequence[Offer], keys: Sequence[BlockKey], *, last_chance: bool) -> None:
        """Accept, decline or defer each offered block. If there are too few slots, earlier blocks are accepted."""
        state = self._state
        if state.degraded is not None:
            self._settle(keys, StoreOutcome.DEGRADED)
            return
        blocks, in_flight = blocks_of(offers), self.in_flight.keys.keys()
        if NULL_BLOCK in blocks or not (in_flight.isdisjoint(keys) and state.pool.index.isdisjoint(keys)):
            offers = self._fresh(offers)
            if not offers:
                return
            keys, blocks = keys_of(offers), blocks_of(offers)
        # Compare each key with the engine's own hash of the block, to detect stale offers (R7).
        held = state.device.keys_of(blocks)
        if None in held and not state.epoch:
            offers, held = self._hashed(offers, held)
            if not offers:
                return
            keys, blocks = keys_of(offers), blocks_of(offers)
        if (
            not state.epoch
            and held == [*keys]
            and (count := len(keys)) <= min(state.pool.room, self.room)
            and state.leases.counts.keys().isdisjoint(blocks)
            and len(set(keys)) == count
        ):
            self._accept(offers, keys, blocks)  # fast path: usually all blocks are accepted
        else:
            self._admit_some(offers, held, last_chance=last_chance)

    def _fresh(self, offers: Sequence[Offer]) -> list[Offer]:
        """Return the offers of keys that are neither on the host nor in flight, without null blocks.

        Settle the offers of keys on the host, and defer the offers of keys in flight.
        """
        parts, in_flight = self._state.pool.index.parts, self.in_flight
        fresh: list[Offer] = []
        cached: list[Offer] = []
        for offer in offers:
            is_cached = [key in parts[key[0]] for key in offer.keys]
            if False not in is_cached:
                cached.append(offer)
                continue
            if True in is_cached:
                found, offer = offer.split(is_cached)
                cached.append(found)
            if not in_flight.keys.keys().isdisjoint(offer.keys):
                duplicates, offer = offer.split([key in in_flight.keys for key in offer.keys])
                for duplicate in singles([duplicates]):
                    in_flight.wait(duplicate)
            if offer.keys:
                fresh.append(offer)
        if cached:
            self._already_cached(cached)
        return self._elsewhere(fresh)

    def _elsewhere(self, offers: Sequence[Offer]) -> list[Offer]:
        """Offer other blocks instead of null blocks; decline offers whose keys no other block has.

        A table's position is null if it was zeroed, or if it is before the window of a sliding-window group.
        """
        block_of = self._state.device.block_of
        found: list[Offer] = []
        gone: list[BlockKey] = []
        for offer in offers:
            if NULL_BLOCK in offer.blocks:
                pairs = zip(offer.blocks, offer.keys, strict=True)
                blocks = [(block_of(key) or block) if block == NULL_BLOCK else block for block, key in pairs]
                offer, rest = offer._replace(blocks=blocks).split([block != NULL_BLOCK for block in blocks])
                gone += rest.keys
            found.append(offer)
        self._settle(gone, StoreOutcome.STALE)
        return some(found)

    def _hashed(
        self, offers: Sequence[Offer], held: Sequence[BlockKey | None]
    ) -> tuple[list[Offer], list[BlockKey | None]]:
        """Decline offers of blocks that the engine did not hash; return the rest, with their blocks' keys."""
        copied = self._state.leases.counts
        is_hashed = [
            holds is not None or block in copied for block, holds in zip(blocks_of(offers), held, strict=True)
        ]
        self._settle(list(compress(keys_of(offers), map(not_, is_hashed))), StoreOutcome.NOT_HASHED)
        each = iter(is_hashed)
        left = [offer.part(list(islice(each, len(offer.keys)))) for offer in offers]
        return some(left), list(compress(held, is_hashed))

    def _admit_some(
        self, offers: Sequence[Offer], held: Sequence[BlockKey | None], *, last_chance: bool
    ) -> None:
        """Accept blocks in order while there is room. A duplicate of an accepted block waits for that block's store."""
        state = self._state
        accepted: dict[BlockKey, Offer] = {}
        duplicates: list[Offer] = []
        copied, host_room, lease_room = state.leases.counts, state.pool.room, self.room
        room = min(host_room, lease_room)
        for offer, holds in zip(singles(offers), held, strict=True):
            key = offer.keys[0]
            if key in accepted:
                duplicates.append(offer)
                continue
            is_known = holds == key and offer.blocks[0] not in copied and not state.epoch
            refused = None if is_known else self._refuses(offer, holds)
            if refused is not None:
                self._decline(offer, refused, last_chance=last_chance)
            elif len(accepted) < room:
                accepted[key] = offer
            else:
                self._decline(offer, self._without_room(host_room <= lease_room), last_chance=last_chance)
        if accepted:
            taken = list(accepted.values())
            self._accept(taken, keys_of(taken), blocks_of(taken))
        for duplicate in duplicates:
            self.in_flight.wait(duplicate)

    def _without_room(self, is_host_full: bool) -> StoreOutcome:
        """Return why there is no room for an offer: the host is full, or the lease limit is reached."""
        if is_host_full:
            return StoreOutcome.NOT_READY if self._state.growing else StoreOutcome.HOST_FULL
        return StoreOutcome.STALLED if self._state.stall.is_on else StoreOutcome.LEASE_LIMIT

    def _refuses(self, offer: Offer, holds: BlockKey | None) -> StoreOutcome | None:
        """Return why the offer of a block that now has the key `holds` must be declined, or None (R3, R7, R10)."""
        state, block = self._state, offer.blocks[0]
        if state.epoch and not self._is_since_reset(offer, block):
            return StoreOutcome.BEFORE_RESET
        if block in state.leases.counts:
            return StoreOutcome.FAILED
        if holds != offer.keys[0]:
            return StoreOutcome.NOT_HASHED if holds is None else StoreOutcome.STALE
        return None

    def _is_since_reset(self, offer: Offer, block: DeviceBlockId) -> bool:
        """Return whether a block and its request's earlier blocks were computed after the last reset (R10)."""
        record = offer.record
        is_tainted = record is not None and record.is_live and not record.may_store
        return block in self._state.computed_since_reset and not is_tainted

    def _decline(self, offer: Offer, outcome: StoreOutcome, *, last_chance: bool) -> None:
        """Defer an offer if its outcome may still change; otherwise settle the offer."""
        record = owner(offer) if outcome in _WAITS and not last_chance else None
        if record is None:
            self._settle(offer.keys, outcome)
            return
        groups = self._state.shape.groups
        position, group = divmod(offer.places[0], len(groups))
        place = groups[group].group, position
        record.waiting[place] = None
        if outcome in _FOR_ROOM:
            is_state = groups[group].kind is AttentionKind.RECURRENT
            queue = self.states_for_room if is_state else self.for_room
            queue.setdefault(record, deque()).append(place)
        if outcome is not StoreOutcome.LEASE_LIMIT:
            self._state.misses.note(offer.keys, MISS_CAUSES[outcome])

    def _accept(
        self, offers: Sequence[Offer], keys: Sequence[BlockKey], blocks: Sequence[DeviceBlockId]
    ) -> None:
        """Add offers to the step's job: reserve slots and lease the blocks. There must be room for all blocks."""
        state = self._state
        job = self.batch
        if job is None:
            job = self.batch = Store(self, [], [])
            state.jobs.plan(job)
        slots, evicted = state.pool.reserve(keys)
        job.slots += slots
        job.offers += offers
        job.keys += keys
        self.in_flight.began(keys, job)
        if evicted:
            state.evicted(evicted)
            if self.evictions.watches:
                self.evicted(evicted)
        state.leases.take(blocks)
        job.targets += blocks
        self.leased_blocks += len(blocks)
        state.requests.stores(job.concerns, offers)

    # -- endings ------------------------------------------------------------------------------------------------

    def reported(self, job: Store, rank: Rank, report: JobReport) -> None:
        """Fail a store as soon as one rank has failed. Its memory is released after the last rank's report (R4)."""
        if report.outcome is not CopyOutcome.DONE and not job.settled:
            self.failed(job, Failure.FAILED)

    def failed(self, job: Store, why: Failure) -> None:
        """Invalidate a failed store's slots, and offer waiting duplicates again.

        After a timeout, quarantine the slots (R16).
        """
        pool = self._state.pool
        if not job.settled:
            job.settled = True
            for slot in job.slots:
                pool.invalidate(slot)
            outcome = why.of_store if self._state.degraded is None else StoreOutcome.DEGRADED
            self._settle(job.keys, outcome)
            self.again += self.in_flight.ended(job.keys)
        if why is Failure.TIMED_OUT:
            for slot in job.slots:
                pool.quarantine(slot)

    def ended(self, job: Store) -> None:
        """Release a job's memory after every rank has ended its copy."""
        state = self._state
        if job.settled:
            state.pool.drained(job.slots)
        else:
            self._arrived(job)
        if job is self.batch:
            self.batch = None
        self.leased_blocks -= len(job.targets)
        state.leases.release(job.targets)
        for record in job.concerns:
            state.requests.job_ended(record)
            state.retention.release_if_over(record)

    def stop(self, outcome: StoreOutcome) -> None:
        """Settle all waiting offers. Call this method after dropping the open stores."""
        for record in tuple(self._state.requests.live.values()):
            self.settle_waiting(record, outcome)
        again, self.again = self.again, []
        if again:
            self._settle(keys_of(again), outcome)

    def _arrived(self, job: Store) -> None:
        """Let lookups find a store's blocks, which every rank has copied. The deepest blocks are evicted first."""
        state = self._state
        job.settled = True
        state.retention.arrived(job)
        keys, lasting = job.keys, job.keys
        if state.requests.some_private:
            lasts = [self._persists(offer) for offer in job.offers for _ in offer.keys]
            state.pool.private.update(compress(job.slots, map(not_, lasts)))
            lasting = list(compress(keys, lasts))
        state.pool.fill(job.slots[::-1])
        for tier in state.tiers:
            if tier.takes_all:
                tier.reuse(lasting[::-1])
        if duplicates := self.in_flight.ended(keys):
            self.arrived_otherwise(duplicates)
        state.tally.count_stores(_STORED, len(keys))
        shape = state.shape
        if shape.state_key_ends and (states := shape.count_states(keys)):
            state.tally.events.append(StatesCopied(Direction.STORE, states))

    @staticmethod
    def _persists(offer: Offer) -> bool:
        """Return whether later processes may find an offer's blocks, once some request's blocks must not be found.

        The lazy planner's offers do not say whose blocks they are.
        """
        return offer.record is not None and offer.record.persists

    # -- outcomes -----------------------------------------------------------------------------------------------

    def _settle(self, keys: Sequence[BlockKey], outcome: StoreOutcome) -> None:
        if not keys:
            return
        self._state.tally.count_stores(outcome, len(keys))
        if (cause := MISS_CAUSES.get(outcome)) is not None:
            index = self._state.pool.index
            self._state.misses.note([key for key in keys if key not in index], cause)

    def _already_cached(self, offers: Sequence[Offer]) -> None:
        """Settle offers of blocks that the host has, and watch for the eviction of these blocks (R8).

        The blocks are not marked as used yet: a request offers its blocks a few at a time, so its head would become the
        least recently used (R15). All of its blocks are marked together when the request releases its slots.
        """
        state = self._state
        state.tally.count_stores(_ALREADY_CACHED, len(keys_of(offers)))
        # The head comes last, so that it is evicted last.
        if ownerless := self._share(offers[::-1]):
            keys = chain.from_iterable([reversed(offer.keys) for offer in ownerless])
            state.pool.use([state.pool.index[key] for key in keys])

    def _share(self, offers: Sequence[Offer]) -> list[Offer]:
        """Watch for the eviction of blocks that other requests stored; return the offers that no request makes now."""
        ownerless: list[Offer] = []
        for offer in offers:
            if (record := owner(offer)) is None:
                ownerless.append(offer)
            else:
                self._state.retention.share(record)
                self.evictions.add(record, offer)
        return ownerless

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """Schedule the watched offers of blocks that the host evicted for the next step."""
        if again := self.evictions.evicted(keys):
            self._state.tally.offered(len(again))
            self.again += again

    # -- waiting ------------------------------------------------------------------------------------------------

    def _take_for_room(self, room: int) -> list[Offer]:
        """Remove and return up to `room` offers that waited for room, recurrent states first."""
        taken: list[Offer] = []
        for queue in (self.states_for_room, self.for_room):
            while queue and len(taken) < room:
                record, positions = next(iter(queue.items()))
                while positions and len(taken) < room:
                    position = positions.popleft()
                    del record.waiting[position]
                    taken.append(self._offer_of(record, *position))
                if not positions:
                    del queue[record]
        return taken

    def _stop_waiting(self, record: RequestRecord) -> None:
        record.waiting.clear()
        self.for_room.pop(record, None)
        self.states_for_room.pop(record, None)

    @staticmethod
    def _offer_of(record: RequestRecord, group: GroupId, position: int) -> Offer:
        """Return an offer of the block at this position of the request's table, which may be the null block."""
        assert record.table is not None, record
        blocks = record.table[group]
        block = blocks[position] if position < len(blocks) else NULL_BLOCK
        keys, groups = (record.keys[group][position],), len(record.keys)
        return Offer(keys, (block,), record, record.incarnation, (position * groups + group,))


_FOR_ROOM = (
    StoreOutcome.LEASE_LIMIT,
    StoreOutcome.NOT_READY,  # the host has no free slot yet, but its memory is growing
    StoreOutcome.STALLED,  # no new copy starts, because too many copies timed out
)
"""Reasons why an offer waits for room. Each step decides on such offers in order, until no room is left."""

_WAITS = (
    *_FOR_ROOM,
    StoreOutcome.HOST_FULL,  # running requests use all slots
    StoreOutcome.FAILED,  # an earlier copy of the block failed, and may still run
)
"""Reasons why an offer waits. With HOST_FULL or FAILED, the offer waits until its request ends.

If an offer cannot wait, the reason is its outcome.
"""

MISS_CAUSES = {
    StoreOutcome.HOST_FULL: MissCause.DECLINED_HOST_FULL,
    StoreOutcome.NOT_READY: MissCause.DECLINED_NOT_READY,
    StoreOutcome.STALLED: MissCause.DECLINED_STALLED,
    StoreOutcome.STALE: MissCause.DECLINED_STALE,
    StoreOutcome.LEASE_LIMIT: MissCause.DECLINED_LEASE_LIMIT,
    StoreOutcome.NOT_HASHED: MissCause.DECLINED_OTHER,
    StoreOutcome.DEGRADED: MissCause.DECLINED_OTHER,
    StoreOutcome.LIMITED: MissCause.LIMITED,
    StoreOutcome.UNSAFE_HASHES: MissCause.UNSAFE_HASHES,
    StoreOutcome.SEEN_ONCE: MissCause.SEEN_ONCE,
    StoreOutcome.LOST: MissCause.LOST,
    StoreOutcome.REQUEST_GONE: MissCause.LOST,
    StoreOutcome.FAILED: MissCause.STORE_FAILED,
    StoreOutcome.ABANDONED: MissCause.STORE_FAILED,
    StoreOutcome.BEFORE_RESET: MissCause.AFTER_RESET,
    StoreOutcome.CANCELLED: MissCause.AFTER_RESET,
}
"""Why a later lookup misses a block that was not stored."""
