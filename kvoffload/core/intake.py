"""Intake: requests come, get block tables, run, lose them, and go."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.states import RequestEvent, RequestState
from kvoffload.model.causes import SurpriseCause
from kvoffload.model.events import EngineSurprised
from kvoffload.model.facts import BlocksAllocated, RequestEnded, RequestSeen, StepScheduled
from kvoffload.model.ids import NULL_BLOCK, DeviceBlockId, RequestId

# To reach an enum's member by its class takes ten times as long.
_SEEN = RequestState.SEEN
_RUNNING = RequestState.RUNNING


class Intake:
    """Keeps request records and block tables in line with what the engine tells."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._newly_allocated: set[RequestId] = set()

    def on_seen(self, fact: RequestSeen) -> None:
        """A request came. A live one of that name is a surprise, and stays."""
        if self._state.requests.live(fact.request) is not None:
            self._surprised(fact.request)
            return
        keys = tuple(map(list, fact.keys))
        self._state.requests.seen(RequestRecord(fact.request, fact.prompt_tokens, keys, fact.reads_cache))

    def on_allocated(self, fact: BlocksAllocated) -> None:
        """A request got a block table. Blocks behind the device's own hit were handed out for it."""
        state = self._state
        record = state.requests.live(fact.request)
        if record is None:
            self._surprised(fact.request)
            self._handed_out(self._new_blocks(fact), since_reset=False)
            return
        if record.state is _SEEN:
            record.incarnation += 1
            record.stores = self._is_untainted(fact)
            record.offered = [0] * len(state.shape.groups)
            record.confirmed_tokens = 0
        elif record.state is _RUNNING:
            # What it loaded is there, or was taken back with its table before anyone said so: it keeps nobody waiting.
            state.shared.ended(fact.request)
        self._newly_allocated.add(fact.request)
        self._handed_out(self._new_blocks(fact), since_reset=record.stores)
        state.tables.allocated(fact.request, fact.tables)

    def on_step(self, fact: StepScheduled) -> None:
        """Blocks were handed out, tables grew, tokens were confirmed. Preempted requests were told before."""
        self._newly_allocated.clear()
        if fact.progress or fact.handed_out:  # most steps have neither
            self._take_in(fact)

    def _take_in(self, fact: StepScheduled) -> None:
        state = self._state
        # All ids are struck before any is recorded.
        grown = [block for progress in fact.progress for blocks in progress.new_blocks for block in blocks]
        if grown or fact.handed_out:
            self._strike([*fact.handed_out, *grown])
        if state.generation:
            self._separate_new(fact)
        requests, shared, tables = state.requests, state.shared, state.tables
        for request, confirmed_tokens, new_blocks, new_keys in fact.progress:
            record = requests.live(request)
            if record is None or record.state is not _RUNNING:
                self._surprised(request)
                continue
            shared.ended(request)
            if new_blocks:
                tables.appended(request, new_blocks)
            if new_keys:
                record.extend_keys(new_keys)
            if confirmed_tokens > record.confirmed_tokens:
                record.confirmed_tokens = confirmed_tokens

    def is_newly_allocated(self, request: RequestId) -> bool:
        """Whether a request got its block table since the last step was told. Reads only."""
        return request in self._newly_allocated

    def preempted(self, record: RequestRecord) -> None:
        """The engine took a running request's blocks back; the planner has had its turn."""
        self._state.requests.move(record, RequestEvent.PREEMPT)
        self._gave_up_table(record)
        self._state.holds.let_go_if_over(record)
        record.incarnation += 1

    def _gave_up_table(self, record: RequestRecord) -> None:
        """A request's incarnation is over: let go of all that was tied to its table."""
        state = self._state
        state.tables.forget(record.request)
        state.restores.forget(record.request)
        state.shared.ended(record.request)

    def on_ended(self, fact: RequestEnded) -> None:
        """A request is over; the planner and the load desk have had their turn."""
        record = self._state.requests.live(fact.request)
        if record is None:
            self._surprised(fact.request)
            return
        self._newly_allocated.discard(fact.request)
        self._gave_up_table(record)
        self._state.requests.move(record, RequestEvent.END)
        self._state.holds.let_go_if_over(record)

    def _new_blocks(self, fact: BlocksAllocated) -> list[DeviceBlockId]:
        blocks: list[DeviceBlockId] = []
        for group, table in zip(self._state.shape.groups, fact.tables, strict=True):
            blocks += table[-(-fact.device_tokens // group.block_tokens) :]
        return blocks

    def _handed_out(self, blocks: Collection[DeviceBlockId], *, since_reset: bool) -> None:
        """Ids were handed out: strike them from other records, and note what a reset separates."""
        self._strike(blocks)
        if self._state.generation:
            self._separate(blocks, since_reset=since_reset)

    def _strike(self, blocks: Collection[DeviceBlockId]) -> None:
        zeroed = self._state.tables.handed_out(blocks)
        if zeroed:
            self._state.outbox.zeroed(zeroed)

    def _separate_new(self, fact: StepScheduled) -> None:
        self._separate(fact.handed_out, since_reset=False)
        for progress in fact.progress:
            record = self._state.requests.live(progress.request)
            since_reset = record is not None and record.stores
            self._separate([*chain.from_iterable(progress.new_blocks)], since_reset=since_reset)

    def _separate(self, blocks: Collection[DeviceBlockId], *, since_reset: bool) -> None:
        """After a reset: note whether what is computed into these blocks from now on may be found."""
        fresh = self._state.computed_since_reset
        if since_reset:
            fresh.update(blocks)
            fresh.discard(NULL_BLOCK)
        else:
            fresh.difference_update(blocks)

    def _is_untainted(self, fact: BlocksAllocated) -> bool:
        """Whether all that the device brings was computed after the last reset (R10)."""
        state = self._state
        if not state.generation:
            return True
        fresh = state.computed_since_reset
        return all(
            block == NULL_BLOCK or block in fresh
            for group, table in zip(state.shape.groups, fact.tables, strict=True)
            for block in table[: fact.device_tokens // group.block_tokens]
        )

    def _surprised(self, request: RequestId) -> None:
        self._state.outbox.put(EngineSurprised(SurpriseCause.UNKNOWN_REQUEST, request))
