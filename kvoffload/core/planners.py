"""Store planners, which decide when a computed block is offered to the host.

`eager` offers a block as soon as the block's tokens are confirmed. `twice` does so too, but offers a full host only
blocks that were offered before. `lazy` offers only blocks that the device is about to evict. The engine may reuse freed
blocks at any time, so `lazy` also checks a request's blocks when the request ends.
To add a planner, write a class with the name and the seven methods of `EagerPlanner` and add a branch to `make_planner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import ClassVar, TypeVar

from kvoffload.core.jobs import Offer, depth_of, singles, some
from kvoffload.core.machine import RequestState, SlotState
from kvoffload.core.recent import RecentItems
from kvoffload.core.request import RequestRecord, from_fields
from kvoffload.core.state import CoreState
from kvoffload.core.stores import MISS_CAUSES, Stores
from kvoffload.model.causes import StoreOutcome
from kvoffload.model.facts import StepScheduled, TailHandedOff
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId

_RUNNING = RequestState.RUNNING
_offer = from_fields(Offer)
T = TypeVar("T")


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
        for offer in _confirmed(self._state, record, self._stores):
            lost = offer.part([key not in index for key in offer.keys])
            self._stores.refuse((lost,), StoreOutcome.LOST)
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
        known: list[Offer] = []
        fresh: list[Offer] = []
        for offer in offers:
            is_known: list[bool] = []
            for key in offer.keys:
                has_slot = key in pool.index or key in in_flight
                is_known.append(has_slot or empty > 0 or key in offered)
                empty -= is_known[-1] and not has_slot
                offered.add(key, pool.capacity)
            known_part, fresh_part = offer.split(is_known)
            known.append(known_part)
            fresh.append(fresh_part)
        self._stores.refuse(some(fresh), StoreOutcome.SEEN_ONCE)
        return some(known)


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
        held = self._state.device.keys_of([offer.blocks[0] for offer in offers])
        lost = [offer for offer, holds in zip(offers, held, strict=True) if holds != offer.keys[0]]
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
        room = state.pool.room
        offers: list[Offer] = []
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
                offers.append(Offer((key,), (block,)))
        fitting, no_slot = offers[:room], offers[room:]
        stored = fitting[: self._stores.room]
        is_all = stored == fitting and not (no_slot and state.growing)
        self._clean = len(blocks) - len(stored) if is_all else 0
        self._stored += len(stored)
        # The device evicts the deepest blocks first, but a job lists heads first, so the order is reversed.
        self._stores.offer(stored[::-1])
        outcome = StoreOutcome.NOT_READY if state.growing else StoreOutcome.HOST_FULL
        cause = MISS_CAUSES[outcome]
        refused = [offer for offer in no_slot if state.misses.cause(offer.keys[0]) is not cause]
        self._stores.refuse(refused, outcome)

    def _unknown(self, record: RequestRecord) -> list[Offer]:
        """Return an offer of each block of the request that is neither on the host nor being copied there, heads first."""
        index, in_flight = self._state.pool.index, self._stores.in_flight.keys
        states = list(_handed_off(self._state, record))
        if record.limits.store_tokens is not None:
            states = self._stores.within(record.limits.store_tokens, states, record.limits.counts_as)
        offers = [*singles(_confirmed(self._state, record, self._stores)), *states]
        if states:
            offers.sort(key=lambda offer: depth_of(offer.places[0], self._state.shape.groups))
        return [offer for offer in offers if offer.keys[0] not in index and offer.keys[0] not in in_flight]


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


def _confirmed(state: CoreState, record: RequestRecord, stores: Stores) -> Sequence[Offer]:
    """Return an offer of the blocks confirmed since the last call, and mark them as offered; no offer without blocks.

    Refuse blocks beyond the request's own limit. Ignore loaded blocks, which the host has, and recurrent states, which are offered when the engine hands them off.
    """
    size, offered = state.shape.block_tokens, record.offered
    if size and record.confirmed_tokens < (min(offered) + 1) * size:
        return ()
    offer = (_in_step(record, size) if size else None) or _by_group(state, record)
    if offer is None:
        return ()
    limit = record.limits.store_tokens
    return (offer,) if limit is None else stores.within(limit, (offer,), record.limits.counts_as)


def _in_step(record: RequestRecord, size: int) -> Offer | None:
    """Return an offer of the same positions of all groups, or None if they differ. All groups have equal blocks."""
    table, keys, offered, groups = record.table, record.keys, record.offered, len(record.keys)
    assert table is not None, record
    first, end = offered[0], record.confirmed_tokens // size
    if groups == 1:
        blocks, found_keys = table[0][first:end], keys[0][first:end]
    else:
        if min(map(len, table)) < end or min(map(len, keys)) < end or offered.count(first) < groups:
            return None
        blocks, found_keys = _interleaved(table, first, end), _interleaved(keys, first, end)
    count = len(blocks)
    if not count or count != len(found_keys):
        return None
    if first * size < record.loaded_tokens and _lacks_some(record, blocks, first, size):
        return None
    end = first + count // groups
    record.offered = [end] * groups
    return _offer((found_keys, blocks, record, record.incarnation, range(first * groups, end * groups)))


def _lacks_some(record: RequestRecord, blocks: Sequence[DeviceBlockId], first: int, size: int) -> bool:
    """Return whether some blocks of a hit must not be offered: those loaded, or null blocks of the device's own hit.

    In a window group, the blocks before the window of the device's own hit are null blocks.
    """
    groups, loaded = len(record.keys), record.loaded_tokens // size
    of_hit = blocks[: (loaded - first) * groups]
    return record.found_tokens // size < loaded or NULL_BLOCK in of_hit


def _interleaved(columns: Sequence[list[T]], first: int, end: int) -> list[T]:
    """Return the items of all columns from `first` to `end`: the first of each column, then the second of each."""
    return [column[position] for position in range(first, end) for column in columns]


def _by_group(state: CoreState, record: RequestRecord) -> Offer | None:
    """Return an offer of the blocks that each group has confirmed, without loaded blocks and null blocks of a hit."""
    assert record.table is not None, record
    groups = len(record.keys)
    rows: list[tuple[int, BlockKey, DeviceBlockId, int]] = []
    for number, size in state.offered_groups:
        first, blocks, keys = record.offered[number], record.table[number], record.keys[number]
        end = min(record.confirmed_tokens // size, len(blocks), len(keys))
        if end <= first:
            continue
        record.offered[number] = end
        found, loaded = record.found_tokens // size, record.loaded_tokens // size
        of_hit = [position for position in range(first, min(found, end)) if blocks[position] != NULL_BLOCK]
        rows += [
            (position * size, keys[position], blocks[position], position * groups + number)
            for position in (*of_hit, *range(max(first, loaded), end))
        ]
    if not rows:
        return None
    rows.sort(key=itemgetter(0))
    _, *columns, places = zip(*rows, strict=True)
    return _offer((*map(list, columns), record, record.incarnation, places))


def _handed_off(state: CoreState, record: RequestRecord) -> Iterator[Offer]:
    """Yield offers of the recurrent states that the engine handed off and whose blocks it has not allocated again."""
    assert record.table is not None, record
    for group in state.shape.groups:
        if group.kind is AttentionKind.RECURRENT:
            number, keys = group.group, record.keys[group.group]
            for position, block in enumerate(record.table[number]):
                if block != NULL_BLOCK:
                    place = position * len(record.keys) + number
                    yield Offer((keys[position],), (block,), record, record.incarnation, (place,))
