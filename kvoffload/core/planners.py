"""Store planners, which decide when a computed block is offered to the host.

`eager` offers a block as soon as the block's tokens are confirmed. `twice` does so too, but offers a full host only
blocks that were offered before. `lazy` offers only blocks that the device is about to evict. The engine may reuse freed
blocks at any time, so `lazy` also checks a request's blocks when the request ends.
To add a planner, write a class with the name and the seven methods of `EagerPlanner` and add a branch to `make_planner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, repeat
from operator import itemgetter
from typing import ClassVar

from kvoffload.core.jobs import Offer
from kvoffload.core.machine import RequestState, SlotState
from kvoffload.core.recent import RecentItems
from kvoffload.core.request import RequestRecord, from_fields
from kvoffload.core.state import CoreState
from kvoffload.core.stores import MISS_CAUSES, Stores
from kvoffload.model.causes import StoreOutcome
from kvoffload.model.facts import StepScheduled, TailHandedOff
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId, GroupId

_RUNNING = RequestState.RUNNING
_POSITION: Callable[[Offer], int] = itemgetter(5)
_offer = from_fields(Offer)


class EagerPlanner:
    """Offers every block as soon as its tokens are confirmed.

    Args:
        state: the core's state.
        stores: gets the offers.
        due: running requests, some of whose blocks another planner has not offered.
    """

    name: ClassVar[str] = "eager"

    def __init__(self, state: CoreState, stores: Stores, due: Iterable[RequestRecord] = ()) -> None:
        self._state = state
        self._stores = stores
        self._due = dict.fromkeys(due)
        self._offer = stores.offer

    def allocated(self, record: RequestRecord) -> None:
        """Handle a request's new block table. The request either runs or waits for a load into the table."""
        if record.state is _RUNNING:
            self._due[record] = None

    def loaded(self, record: RequestRecord) -> None:
        """Handle a successful load. The request runs, and the device has the KV of its confirmed tokens."""
        self._due[record] = None

    def step(self, fact: StepScheduled, advanced: Sequence[RequestRecord]) -> None:
        """Offer newly confirmed blocks of requests that advanced in the step or started to run since the previous step.

        Args:
            fact: the step.
            advanced: running requests that got blocks or confirmed tokens in the step.
        """
        if not (self._due or advanced):
            return
        due = self._due | dict.fromkeys(advanced)
        self._due = {}
        offers: list[Offer] = []
        for record in due:
            if record.state is _RUNNING:
                offers += _confirmed(self._state, record, self._stores)
        if offers:
            self._offer(offers)

    def states(self, offers: Sequence[Offer]) -> None:
        """Offer the recurrent states that a step completes. The engine may soon free the blocks that hold them."""
        self._offer(offers)

    def tails(self, offers: Sequence[Offer]) -> None:
        """Offer the blocks of tails."""
        self._stores.offer_tails(offers)

    def ending(self, record: RequestRecord) -> None:
        """Offer a running request's remaining blocks before the engine frees them."""
        self._due.pop(record, None)
        if record.waiting:
            self._stores.ending(record)
        if offers := _confirmed(self._state, record, self._stores):
            self._offer(offers, last_chance=True)

    def preempted(self, record: RequestRecord) -> None:
        """Count a preempted request's blocks as lost, except those offered before or cached on the host."""
        self._due.pop(record, None)
        index = self._state.pool.index
        lost = [offer for offer in _confirmed(self._state, record, self._stores) if offer.key not in index]
        self._stores.refuse(lost, StoreOutcome.LOST)
        record.offered = [*self._state.none_offered]


class TwicePlanner(EagerPlanner):
    """Offers blocks like `EagerPlanner`, but a full host gets only blocks that were offered recently.

    On a host smaller than what returns to it, most stores would evict a block that is used again for one that is not.
    "Recently" is within as many offers as the host has slots, or up to twice as many. With a longer memory, blocks count
    that return too rarely to be found on such a host.
    """

    name = "twice"

    def __init__(self, state: CoreState, stores: Stores, due: Iterable[RequestRecord] = ()) -> None:
        super().__init__(state, stores, due)
        self._offer = self._offer_known
        self._offered = RecentItems[BlockKey]()

    def tails(self, offers: Sequence[Offer]) -> None:
        if known := self._known(offers):
            self._stores.offer_tails(known)

    def _offer_known(self, offers: Sequence[Offer], *, last_chance: bool = False) -> None:
        if known := self._known(offers):
            self._stores.offer(known, last_chance=last_chance)

    def _known(self, offers: Sequence[Offer]) -> list[Offer]:
        """Return offers of blocks that were offered recently or that the host has, and others for which it has empty slots.

        Refuse the rest.
        """
        pool, in_flight, offered = self._state.pool, self._stores.in_flight.keys, self._offered
        empty = pool.count(SlotState.EMPTY)
        known, fresh = list[Offer](), list[Offer]()
        for offer in offers:
            key = offer.key
            has_slot = key in pool.index or key in in_flight
            if has_slot or empty > 0 or key in offered:
                known.append(offer)
                empty -= not has_slot
            else:
                fresh.append(offer)
            offered.add(key, pool.capacity)
        self._stores.refuse(fresh, StoreOutcome.SEEN_ONCE)
        return known


class LazyPlanner:
    """Offers the blocks that the device evicts next.

        allocated next                                         freed last
        |<- turnover ->|<- turnover ->|<------ 2 turnovers ----->|
         as many as one  must be clean    a look-ahead reaches to here
         step allocates  up to here

    A block is clean if the host has it, if the host has no slot for it, or if no lookup could find it. When a
    look-ahead stores a block, the block is leased and leaves the free queue until its copy has ended. Then the block
    joins the end of the queue, and the blocks behind its old place have moved up. So the queue must begin with enough
    clean blocks to last until later look-aheads have stored the blocks that moved up.

    While the engine allocates no blocks, the planner stops after storing as many blocks as the host has slots. More
    stores would only evict blocks just stored: with more blocks in the queue than slots on the host, stores would never
    end, and an engine without requests would have to keep stepping.
    """

    name: ClassVar[str] = "lazy"

    def __init__(self, state: CoreState, stores: Stores) -> None:
        self._state = state
        self._stores = stores
        self._enough = 2 * state.shape.turnover_blocks
        recurrent = [group for group in state.shape.groups if group.kind is AttentionKind.RECURRENT]
        # For each request, a recurrent group allocates two blocks that are not in the request's table: one for the
        # running state and one for a state to keep.
        self._for_states = 2 * len(recurrent)
        self._clean = 0
        self._stored = 0  # blocks stored since the last allocation
        self._has_limits = False  # True after the first request with a limit on stores
        self._limited: set[DeviceBlockId] = set()  # blocks that requests allocated beyond their own limits

    def allocated(self, record: RequestRecord) -> None:
        self._has_limits |= record.limits.store_tokens is not None
        if self._has_limits:
            self._limit(record, record.table or (), record.found_tokens)
        self._reallocated(sum(map(len, record.table or ())) + self._for_states)

    def loaded(self, record: RequestRecord) -> None:
        """Do nothing: `allocated` has counted the request's blocks."""

    def step(self, fact: StepScheduled, advanced: Sequence[RequestRecord]) -> None:
        if self._has_limits:
            self._limited.difference_update(fact.reallocated)
            for progress in fact.progress:
                if (record := self._state.requests.live.get(progress.request)) is not None:
                    self._limit(record, progress.new_blocks)
            self._limited.update(tail.block for tail in fact.tails if self._exceeds(tail))
        new = sum([len(blocks) for progress in fact.progress for blocks in progress.new_blocks])
        self._reallocated(new + len(fact.reallocated))
        is_host_turned_over = self._stored and self._stored >= self._state.pool.capacity
        if self._clean < self._enough and not is_host_turned_over:
            self._look_ahead()

    def states(self, offers: Sequence[Offer]) -> None:
        """Do nothing: a look-ahead finds the states after the engine has freed the blocks that hold them."""

    def tails(self, offers: Sequence[Offer]) -> None:
        """Do nothing: like states, tails are found by a look-ahead."""

    def ending(self, record: RequestRecord) -> None:
        """Offer the request's deepest blocks if the free queue is so short that one or two steps may evict them."""
        reach = self._enough - self._state.device.free_blocks()
        if reach > 0:
            # The engine frees the deepest blocks first, so that it also evicts them first.
            self._stores.offer(self._unknown(record)[-reach:], last_chance=True)

    def preempted(self, record: RequestRecord) -> None:
        """Count a preempted request's blocks as lost if they have already been allocated again."""
        offers = self._unknown(record)
        held = self._state.device.keys_of([offer.block for offer in offers])
        lost = [offer for offer, holds in zip(offers, held, strict=True) if holds != offer.key]
        self._stores.refuse(lost, StoreOutcome.LOST)
        record.offered = [*self._state.none_offered]

    def _reallocated(self, blocks: int) -> None:
        self._clean -= blocks
        if blocks:
            self._stored = 0

    def _limit(
        self, record: RequestRecord, new: Sequence[Sequence[DeviceBlockId]], device_tokens: int = 0
    ) -> None:
        """Record which of a request's new blocks look-aheads must leave out.

        Args:
            record: the request, whose table includes the new blocks.
            new: per group, the last blocks of the table.
            device_tokens: the blocks of so many tokens at the beginning of `new` were computed for other requests. If
                this request has no limit, they may be stored for it.
        """
        limit = record.limits.store_tokens
        tables = record.table or ()
        for group, table, blocks in zip(self._state.shape.groups, tables, new, strict=False):
            first = 0 if limit is None else -(-device_tokens // group.block_tokens)
            self._limited.difference_update(blocks[first:])
            if limit is not None:
                allowed = limit // group.block_tokens - (len(table) - len(blocks))
                self._limited.update(blocks[max(allowed, first) :])
        self._limited.discard(NULL_BLOCK)

    def _exceeds(self, tail: TailHandedOff) -> bool:
        """Return whether a tail is longer than its request's limit on stores."""
        record = self._state.requests.live.get(tail.request)
        limit = None if record is None else record.limits.store_tokens
        return limit is not None and tail.tokens > limit

    def _look_ahead(self) -> None:
        state = self._state
        room, offers = state.pool.room, list[Offer]()
        blocks = list(state.device.next_evictable(2 * self._enough))
        for block, key in zip(blocks, state.device.keys_of(blocks), strict=True):
            if key is None or block in self._limited:
                continue
            if state.epoch and block not in state.computed_since_reset:
                continue
            if (slot := state.pool.index.get(key)) is not None:
                # Mark the host's copy as used, because the engine will soon evict the block. Otherwise, storing the
                # neighbouring blocks could evict this copy, and storing this block again could evict the neighbours.
                room -= state.pool.use((slot,))
            elif key not in self._stores.in_flight.keys:
                offers.append(Offer(key, block))
        fitting, no_slot = offers[:room], offers[room:]
        stored = fitting[: self._stores.room]
        is_all = stored == fitting and not (no_slot and state.growing)
        self._clean = len(blocks) - len(stored) if is_all else 0
        self._stored += len(stored)
        # The device evicts the deepest blocks first, but a job lists heads first, so the order is reversed.
        self._stores.offer(stored[::-1])
        outcome = StoreOutcome.NOT_READY if state.growing else StoreOutcome.HOST_FULL
        cause = MISS_CAUSES[outcome]
        refused = [offer for offer in no_slot if state.misses.cause(offer.key) is not cause]
        self._stores.refuse(refused, outcome)

    def _unknown(self, record: RequestRecord) -> list[Offer]:
        """Return offers of the request's blocks that are neither on the host nor being copied there, heads first."""
        index, in_flight = self._state.pool.index, self._stores.in_flight.keys
        offers = [*_confirmed(self._state, record, self._stores), *_handed_off(self._state, record)]
        if record.limits.store_tokens is not None:
            offers = self._stores.within(record.limits.store_tokens, offers)
        if self._for_states:
            _sort_by_depth(offers, self._state)
        return [offer for offer in offers if offer.key not in index and offer.key not in in_flight]


StorePlanner = EagerPlanner | LazyPlanner


def make_planner(state: CoreState, stores: Stores, policy: str) -> StorePlanner:
    """Return the planner that a store policy names. It may replace another planner while requests run.

    If a few steps can allocate the whole device pool, `lazy` cannot look far enough ahead, so `eager` replaces it.
    """
    if policy == LazyPlanner.name and _can_look_ahead(state):
        return LazyPlanner(state, stores)
    kind = TwicePlanner if policy == TwicePlanner.name else EagerPlanner
    return kind(state, stores, [one for one in state.requests.live.values() if one.state is _RUNNING])


def policies_for(state: CoreState) -> tuple[str, ...]:
    """Return the policies among which `auto` may choose now.

    With lower tiers or host memory in files, later processes and other engines should find all blocks. A hit on a
    recurrent model needs a state, too, so blocks alone do not predict hits. `lazy` must not begin after a request with a
    limit on stores, because it would not know which blocks lie beyond the limit.
    """
    policy = state.policy
    if policy.tiers or policy.keeps_host or state.shape.state_key_ends:
        return (EagerPlanner.name,)
    if state.requests.some_limited or not _can_look_ahead(state):
        return EagerPlanner.name, TwicePlanner.name
    return EagerPlanner.name, TwicePlanner.name, LazyPlanner.name


def _can_look_ahead(state: CoreState) -> bool:
    return 4 * state.shape.turnover_blocks < state.shape.device_blocks


def _confirmed(state: CoreState, record: RequestRecord, stores: Stores) -> list[Offer]:
    """Return offers of the blocks confirmed since the last call, heads first, and mark them as offered.

    Refuse blocks beyond the request's own limit. Ignore loaded blocks, which the host has, and recurrent states, which are offered when the engine hands them off.
    """
    shape, offered, confirmed_tokens = state.shape, record.offered, record.confirmed_tokens
    offers: list[Offer] = []
    if shape.block_tokens and confirmed_tokens < (min(offered) + 1) * shape.block_tokens:
        return offers
    assert record.table is not None, record
    incarnation = record.incarnation
    for number, size in state.offered_groups:
        first, blocks, keys = offered[number], record.table[number], record.keys[number]
        end = min(confirmed_tokens // size, len(blocks), len(keys))
        if end <= first:
            continue
        offered[number] = end
        if first * size < record.loaded_tokens:
            hit, first = _of_hit(record, number, first, end, size)
            offers += hit
        if end - first == 1:  # a fast path for decoding requests
            offers += (_offer((keys[first], blocks[first], record, incarnation, number, first)),)
        else:
            places = repeat(record), repeat(incarnation), repeat(number), count(first)
            offers += map(_offer, zip(keys[first:end], blocks[first:end], *places, strict=False))
    if offers and len(shape.groups) > 1:
        _sort_by_depth(offers, state)
    if offers and record.limits.store_tokens is not None:
        return stores.within(record.limits.store_tokens, offers)
    return offers


def _of_hit(
    record: RequestRecord, group: GroupId, first: int, end: int, size: int
) -> tuple[Sequence[Offer], int]:
    """Return offers of the device's own hit, without null blocks, and the position of the first block after a load.

    If no block must be left out, return no offers and `first`, so that the caller offers all blocks alike.
    """
    assert record.table is not None, record
    loaded, found = min(record.loaded_tokens // size, end), min(record.found_tokens // size, end)
    blocks = record.table[group][first:found]
    # In a window group, the blocks before the window of the device's own hit are null blocks.
    if found == loaded and NULL_BLOCK not in blocks:
        return (), first
    places = repeat(record), repeat(record.incarnation), repeat(group), count(first)
    fields = zip(record.keys[group][first:found], blocks, *places, strict=False)
    return [_offer(each) for each in fields if each[1] != NULL_BLOCK], loaded


def _handed_off(state: CoreState, record: RequestRecord) -> Iterator[Offer]:
    """Yield offers of the recurrent states that the engine handed off and whose blocks it has not allocated again."""
    assert record.table is not None, record
    for group in state.shape.groups:
        if group.kind is AttentionKind.RECURRENT:
            number, keys = group.group, record.keys[group.group]
            for position, block in enumerate(record.table[number]):
                if block != NULL_BLOCK:
                    yield Offer(keys[position], block, record, record.incarnation, number, position)


def _sort_by_depth(offers: list[Offer], state: CoreState) -> None:
    sizes = [group.block_tokens for group in state.shape.groups]
    if len(set(sizes)) == 1:
        offers.sort(key=_POSITION)
    else:
        offers.sort(key=lambda offer: offer.position * sizes[offer.group])
