"""Store planners: when a computed block is offered to the host.

`eager` offers a block as soon as it is confirmed. `lazy` offers what the device is about to evict, and nothing else;
the engine hands freed blocks out again before anyone is asked, so lazy also looks at a request's blocks when it ends.
A planner is a class with these five methods and a line in `STORE_PLANNERS`.
"""

from __future__ import annotations

from typing import Protocol

from kvoffload.core.offers import Offer, offer_of
from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.states import RequestState
from kvoffload.core.store_desk import StoreDesk
from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.facts import StepScheduled
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import NULL_BLOCK, RequestId

# To reach an enum's member by its class takes ten times as long.
_RUNNING = RequestState.RUNNING
_RECURRENT = AttentionKind.RECURRENT


class StorePlanner(Protocol):
    """Decides when a block is offered."""

    def allocated(self, record: RequestRecord) -> None:
        """A request got a block table; it runs, or a load fills it first."""

    def loaded(self, record: RequestRecord) -> None:
        """A request's load ended well: it runs, and the device holds its confirmed tokens."""

    def step(self, fact: StepScheduled) -> None:
        """A step was scheduled: offer what is due."""

    def ending(self, record: RequestRecord) -> None:
        """A running request is about to give its blocks back: offer what is due, for the last time."""

    def preempted(self, record: RequestRecord) -> None:
        """A running request lost its blocks."""


class EagerPlanner:
    """Offers every block once it is confirmed computed.

    Requests that decode complete a few blocks in every step, and a job costs more than its blocks do. So where the
    policy allows, these few wait for those of the next steps; never a second block of one request, and not while the
    device is so full that it may take a running request's blocks back.
    """

    def __init__(self, state: CoreState, desk: StoreDesk) -> None:
        self._state = state
        self._desk = desk
        self._due: dict[RequestId, None] = {}
        self._waited = 0
        self._scarce = 2 * state.shape.turnover_blocks
        self._tokens = state.shape.groups[0].block_tokens

    def allocated(self, record: RequestRecord) -> None:
        self._due[record.request] = None

    def loaded(self, record: RequestRecord) -> None:
        self._due[record.request] = None

    def step(self, fact: StepScheduled) -> None:
        for progress in fact.progress:
            self._due[progress.request] = None
        if not self._due:
            return
        self._waited += 1
        if self._waited < self._state.policy.merge_steps and not self._is_pressing(fact):
            return
        self._waited = 0
        due, self._due = self._due, {}
        offers: list[Offer] = []
        for request in due:
            record = self._state.requests.live(request)
            if record is not None and record.state is _RUNNING:
                offers += _confirmed(self._state, record)
        if offers:
            self._desk.offer(offers)

    def ending(self, record: RequestRecord) -> None:
        self._due.pop(record.request, None)
        self._desk.retry(record)
        if offers := _confirmed(self._state, record):
            self._desk.offer(offers, last_chance=True)

    def preempted(self, record: RequestRecord) -> None:
        self._due.pop(record.request, None)
        index = self._state.pool.index
        lost = [offer for offer in _confirmed(self._state, record) if offer.key not in index]
        self._desk.refuse(lost, StoreOutcome.LOST)

    def _is_pressing(self, fact: StepScheduled) -> bool:
        """Whether what is due must not wait: there is much of it, or it may soon be gone."""
        if self._state.device.free_blocks() < self._scarce:
            return True
        for progress in fact.progress:
            record = self._state.requests.live(progress.request)
            if record is None or not record.has_table:
                continue  # the engine surprised us
            if record.confirmed_tokens // self._tokens > record.offered[0] + 1:
                return True
        return False


class LazyPlanner:
    """Offers the blocks that the device evicts next.

        handed out next                                        freed last
        |<- turnover ->|<- turnover ->|<------ 2 turnovers ----->|
         as many as one  enough must be   a look goes this far
         step hands out  clean up to here

    A block is clean that the host has, cannot have, or could never find. What a look stores is leased, which takes it
    out of the free queue until the copy has ended; it then joins the queue's end. So whatever lies behind it moves up,
    and clean blocks must be left in front of it for the steps until the next looks have stored that too. While nothing
    is handed out that ends with as many blocks as the host holds: more would only push out what was just stored, and a
    queue longer than the host would go round for ever, with an engine that steps for no request.
    """

    def __init__(self, state: CoreState, desk: StoreDesk) -> None:
        self._state = state
        self._desk = desk
        self._enough = 2 * state.shape.turnover_blocks
        self._clean = 0
        self._stored = 0  # since blocks were last handed out

    def allocated(self, record: RequestRecord) -> None:
        self._handed_out(sum(map(len, self._state.tables.table(record.request) or ())))

    def loaded(self, record: RequestRecord) -> None:
        """Its blocks were handed out when they were allocated."""

    def step(self, fact: StepScheduled) -> None:
        new = sum(len(blocks) for progress in fact.progress for blocks in progress.new_blocks)
        self._handed_out(new + len(fact.handed_out))
        is_host_turned_over = self._stored and self._stored >= self._state.pool.capacity
        if self._clean < self._enough and not is_host_turned_over:
            self._look_ahead()

    def ending(self, record: RequestRecord) -> None:
        """Its blocks join the end of the free queue. What one or two steps may evict from there is stored now."""
        reach = self._enough - self._state.device.free_blocks()
        if reach > 0:
            # The engine frees the deepest first, so those are the next to go.
            offers = [offer for offer in _confirmed(self._state, record) if not self._is_known(offer)]
            self._desk.offer(offers[-reach:], last_chance=True)

    def preempted(self, record: RequestRecord) -> None:
        """Its blocks may have been handed out already; those are lost, and counted."""
        self._desk.refuse(
            [offer for offer in _confirmed(self._state, record) if self._is_gone(offer)], StoreOutcome.LOST
        )

    def _handed_out(self, blocks: int) -> None:
        self._clean -= blocks
        if blocks:
            self._stored = 0

    def _look_ahead(self) -> None:
        state = self._state
        room, offers = state.pool.room, list[Offer]()
        blocks = list(state.device.next_evictable(2 * self._enough))
        for block in blocks:
            key = state.device.key_of(block)
            if key is None or (state.generation and block not in state.computed_since_reset):
                continue
            if (slot := state.pool.index.get(key)) is not None:
                # Soon the only copy. Were it evicted for its neighbours here, they would take turns for ever.
                room -= state.pool.touch(slot)
            elif key not in state.stores.keys:
                offers.append(Offer(key, block))
        fitting, no_slot = offers[:room], offers[room:]
        stored = fitting[: self._desk.room]
        is_all = stored == fitting and not (no_slot and state.growing)
        self._clean = len(blocks) - len(stored) if is_all else 0
        self._stored += len(stored)
        self._desk.offer(reversed(stored))  # the device evicts the deepest first; a job has the heads first
        outcome, cause = _NO_SLOT[bool(state.growing)]
        self._desk.refuse([offer for offer in no_slot if state.misses.cause(offer.key) is not cause], outcome)

    def _is_known(self, offer: Offer) -> bool:
        return offer.key in self._state.pool.index or offer.key in self._state.stores.keys

    def _is_gone(self, offer: Offer) -> bool:
        return not self._is_known(offer) and self._state.device.key_of(offer.block) != offer.key


_NO_SLOT = {
    False: (StoreOutcome.HOST_FULL, MissCause.DECLINED_HOST_FULL),
    True: (StoreOutcome.NOT_READY, MissCause.DECLINED_NOT_READY),
}
"""By whether the host's memory grows: what becomes of a block without a slot, and what its key misses for from then on."""


def make_planner(state: CoreState, desk: StoreDesk) -> StorePlanner:
    """Return the planner that the policy names.

    A device pool that a few steps can turn over leaves lazy no time to look ahead: there it is eager.
    """
    if state.policy.store_policy == "lazy" and 4 * state.shape.turnover_blocks < state.shape.device_blocks:
        return LazyPlanner(state, desk)
    return EagerPlanner(state, desk)


def _confirmed(state: CoreState, record: RequestRecord) -> list[Offer]:
    """Return offers of the blocks confirmed since the last call, heads first, and note them as offered.

    Blocks that a load brought are left out: the host has them.
    """
    groups = state.shape.groups
    offers: list[Offer] = []
    for group in groups:
        if group.kind is not _RECURRENT:
            offers += _confirmed_of(state, record, group)
    if len(groups) > 1:
        tokens = [group.block_tokens for group in groups]
        offers.sort(key=lambda offer: offer.position * tokens[offer.group])
    return offers


def _confirmed_of(state: CoreState, record: RequestRecord, group: GroupSpec) -> list[Offer]:
    table = state.tables.table(record.request)
    assert table is not None, record
    number, tokens = group.group, group.block_tokens
    blocks, keys = table[number], record.keys[number]
    first = record.offered[number]
    last = min(record.confirmed_tokens // tokens, len(blocks), len(keys))
    if last <= first:
        return []
    record.offered[number] = last
    request, incarnation = record.request, record.incarnation
    found, loaded = record.found_tokens // tokens, record.loaded_tokens // tokens
    return [
        offer_of((keys[position], blocks[position], request, incarnation, number, position))
        for position in range(first, last)
        # Behind the window of the device's own hit the engine never held a block.
        if position >= loaded or (position < found and blocks[position] != NULL_BLOCK)
    ]
