"""The core of one engine's scheduler side. The core takes facts and returns answers and events.

The core uses no torch, clock, thread, log or random number. The same facts in the same order give the same answers, and
the state can be copied and compared, so tests can explore it. Each class of facts has one method, listed in `_HANDLERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvoffload.core.audit import audit
from kvoffload.core.jobs import DeviceJob, Load, Offer
from kvoffload.core.loads import Loads, Lookups
from kvoffload.core.lower_tiers import LowerTiers
from kvoffload.core.machine import JobState, RequestEvent, RequestState
from kvoffload.core.parts import Parts
from kvoffload.core.planners import make_planner, policies_for
from kvoffload.core.request import RequestRecord
from kvoffload.core.state import CoreState, Policy
from kvoffload.core.stores import Stores
from kvoffload.model import events, facts
from kvoffload.model.causes import DegradeCause, PinDropCause, RejectionCause, StoreOutcome
from kvoffload.model.engine import BlockPool, EngineShape
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId, RequestId
from kvoffload.model.wire import NOTHING, Tier, TransferPlan

_SEEN, _LOADING, _RUNNING = RequestState.SEEN, RequestState.LOADING, RequestState.RUNNING


class OffloadCore:
    """Decides which blocks are stored, found, loaded and evicted.

    Args:
        shape: the engine's fixed properties.
        policy: the operator's choices.
        device: the engine's block pool.
    """

    def __init__(self, shape: EngineShape, policy: Policy, device: BlockPool) -> None:
        self.state = CoreState(shape, policy, device)
        self.stores = Stores(self.state)
        self.lower_tiers = LowerTiers(self.state, self.stores)
        self.tier_store = self.lower_tiers.store
        self._planner = make_planner(self.state, self.stores, policy.store_policy)
        parts = Parts(self.state, self.lower_tiers)
        self._hits = Lookups(self.state, self.lower_tiers, parts)
        self._loads = Loads(self.state, self._hits, parts, self._planner)
        self.lower_tiers.go_on = self._loads.go_on
        self.take_results = self._loads.take_results
        self._least_tokens = policy.min_load_tokens
        self._new: dict[RequestRecord, None] = {}  # requests that got a block table since the last step

    def handle(self, fact: facts.Fact) -> None:
        """Pass a fact to the method for its class. Hooks with facts of one class call that method themselves.

        Facts that concern no request go to the tiers' store.
        """
        kind = type(fact)
        if kind in _HANDLERS:
            _HANDLERS[kind](self, fact)
        else:
            self.tier_store.handle(fact)

    # -- requests -----------------------------------------------------------------------------------------------

    def request_seen(self, fact: facts.RequestSeen, now: float = 0.0) -> None:
        """Register a new request. If its id is already in use, reject the fact and keep the live request.

        Args:
            fact: the request.
            now: the time in seconds, for the ages of evicted blocks.
        """
        self.state.pool.now = now
        live = self.state.requests.live
        if fact.request in live:
            self.state.tally.rejected(RejectionCause.UNKNOWN_REQUEST, fact.request)
            return
        keys = tuple(map(list, fact.keys))
        live[fact.request] = record = RequestRecord(
            fact.request,
            fact.prompt_tokens,
            keys,
            fact.reads_cache,
            fact.persists,
            fact.limits,
            fact.hashes,
            fact.session,
            fact.is_last_turn,
            offered=[*self.state.none_offered],
        )
        if not fact.persists:
            self.state.requests.some_private = True
        if fact.limits.store_tokens is not None:
            self.state.requests.some_limited = True
        if self.state.tiers:
            self.lower_tiers.request_seen(record)

    def lookup(
        self,
        request: RequestId,
        device_tokens: int,
        *,
        may_wait: bool,
        full_tokens: int = 0,
        tokens: int = 0,
        new_keys: Sequence[Sequence[BlockKey]] = (),
    ) -> int | None:
        """Return how many tokens the host adds to the device's hit; None if the engine must look up again later.

        The slots stay pinned until the matching allocation, the next lookup, the request's end or a reset. An engine
        looks up only requests without a block table, so a lookup for a running request means that the engine has
        preempted this request.

        Args:
            request: the request.
            device_tokens: tokens that the device holds.
            may_wait: whether "not yet" is allowed.
            full_tokens: tokens whose full-attention blocks the device holds, if more than `device_tokens`.
            tokens: for a preempted request, how many prompt and generated tokens it has.
            new_keys: per group, the keys of whole blocks that were not reported before.
        """
        state = self.state
        record = state.requests.live.get(request)
        if record is not None and record.state is _RUNNING:
            self._preempt(record)
        if record is not None and new_keys:
            record.extend_keys(new_keys)
        if record is None or record.state is not _SEEN:
            self.state.tally.rejected(RejectionCause.UNKNOWN_REQUEST, request)
            return 0
        if tokens > record.prompt_tokens:
            record.prompt_tokens = tokens
        if not record.least_tokens:
            record.least_tokens = self._least_tokens
        can_wait = may_wait and state.shape.promises.can_wait
        return self._hits.lookup(record, device_tokens, full_tokens, may_wait=can_wait)

    def fetched_tokens(self, request: RequestId, tokens: int) -> Mapping[Tier, int]:
        """Return how many of the `tokens` that the engine last accepted were fetched for the request, by tier."""
        record = self.state.requests.live.get(request)
        if record is None or not record.fetched_from:
            return {}
        return record.fetched_tokens(record.found_tokens, record.found_tokens + tokens, self.state.shape)

    def set_least(self, tier: Tier, tokens: int) -> None:
        """Set the fewest tokens worth a load (HOST) or a fetch from a lower tier.

        The policy's `min_load_tokens` still applies to loads. A request keeps the HOST minimum that applied at its
        first lookup.
        """
        if tier is Tier.HOST:
            self._least_tokens = max(tokens, self.state.policy.min_load_tokens)
        for lower in self.state.tiers:
            if lower.tier is tier:
                lower.least_tokens = tokens

    def blocks_allocated(self, fact: facts.BlocksAllocated) -> None:
        """Store a request's block table in its record. The blocks after the device's own hit are newly allocated."""
        record = self.state.requests.live.get(fact.request)
        if record is None:
            self.state.tally.rejected(RejectionCause.UNKNOWN_REQUEST, fact.request)
            self._reallocated(fact, since_reset=False)
            self._loads.refuse(fact.request, fact.external_tokens)
            return
        was = record.state
        if was is _SEEN:
            record.incarnation += 1
            record.may_store = not self.state.epoch or self._is_untainted(fact)
        elif was is _RUNNING and record.reserved:
            # The load has ended, or the request lost the block table that the load filled.
            self.state.requests.needs_no_load(record)
        self._new[record] = None
        if self.state.tables.entries or self.state.tables.shared or self.state.epoch:
            self._reallocated(fact, since_reset=record.may_store)
        self.state.tables.allocated(record, fact.tables)
        if was is _SEEN:
            self._loads.allocated(record, fact)
            record.confirmed_tokens = record.loaded_tokens
        elif was is _RUNNING and fact.external_tokens:
            self._loads.refuse(fact.request, fact.external_tokens)
        if record.state is not _SEEN:
            self._planner.allocated(record)

    def request_ended(self, fact: facts.RequestEnded) -> None:
        """Handle a request's end, before the engine frees the request's blocks."""
        state = self.state
        record = state.requests.live.get(fact.request)
        if record is None:
            self.state.tally.rejected(RejectionCause.UNKNOWN_REQUEST, fact.request)
            return
        if record.state is _RUNNING:
            self._offer_last(record, fact)
        if record.waiting:
            self.stores.settle_waiting(record, StoreOutcome.REQUEST_GONE)
        if record.hit is not None:
            self._hits.drop(record, PinDropCause.REQUEST_ENDED)
        for job in state.jobs.planned:
            if isinstance(job, Load) and job.record is record:
                state.jobs.drop(job)
                break
        if state.tiers and (record.state is _SEEN or record.rest is not None):
            self.lower_tiers.leaves(record)
            self._loads.stop(record)
        self._new.pop(record, None)
        self._table_ended(record)
        state.requests.move(record, RequestEvent.END)
        state.retention.release_if_over(record)

    def _offer_last(self, record: RequestRecord, fact: facts.RequestEnded) -> None:
        if not fact.holds_blocks:
            self._planner.preempted(record)
            return
        if fact.new_keys:
            record.extend_keys(fact.new_keys)
        if fact.new_blocks:
            self.state.tables.extended(record, fact.new_blocks)
        record.confirmed_tokens = max(record.confirmed_tokens, fact.confirmed_tokens)
        self._planner.ending(record)

    def _preempt(self, record: RequestRecord) -> None:
        """Handle a preemption: the engine has freed a running request's blocks."""
        self._planner.preempted(record)
        self.stores.settle_waiting(record, StoreOutcome.LOST)
        self.state.requests.move(record, RequestEvent.PREEMPT)
        self._table_ended(record)
        self.state.retention.release_if_over(record)
        record.incarnation += 1
        record.fetched_from.clear()

    def _table_ended(self, record: RequestRecord) -> None:
        """Forget a request's block table, and stop watching for evictions of the blocks in it."""
        state = self.state
        state.tables.forget(record)
        if record.watched:
            self.stores.evictions.forget(record)

    # -- steps --------------------------------------------------------------------------------------------------

    def step_scheduled(self, fact: facts.StepScheduled, now: float = 0.0) -> None:
        """Apply a step that the engine scheduled, and plan the copies that follow from it.

        Preempted requests are handled first, because this step may allocate their blocks again. Next, newly allocated
        ids are zeroed in all other tables, before any block of the step is offered.
        """
        state = self.state
        state.pool.now = now
        state.steps += 1
        if fact.preempted:
            self._preempt_all(fact.preempted)
        if self._new:
            self._new.clear()
        advanced = self._advance(fact) if fact.progress or fact.reallocated else []
        if state.degraded is None:
            if fact.states or fact.tails:
                self._offer_states(fact)
            if self.stores.again or self.stores.for_room or self.stores.states_for_room:
                self.stores.next_step()
            self._planner.step(fact, advanced)
            for queue in self.tier_store.queues:
                if queue:
                    self.lower_tiers.step()
                    break

    def plan(self) -> TransferPlan:
        """Return the copies planned since the last call, and mark their jobs as submitted."""
        state = self.state
        if not (state.jobs.planned or state.jobs.cancelled):
            return NOTHING
        if self.stores.batch is not None:
            self.stores.schedule(self.stores.batch)
        return state.jobs.submit()

    def _preempt_all(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            record = self.state.requests.live.get(request)
            # A preempted request may have got a new table within the same step, and keeps that table.
            if record is not None and record.state is _RUNNING and record not in self._new:
                self._preempt(record)

    def _advance(self, fact: facts.StepScheduled) -> list[RequestRecord]:
        """Record a step's new blocks and confirmed tokens; return the running requests that got any."""
        state = self.state
        advanced: list[RequestRecord] = []
        if state.tables.entries or state.tables.shared:
            # Zero stale entries before adding new ones, because `reallocated` would zero the new ones, too.
            grown = [
                block for progress in fact.progress for blocks in progress.new_blocks for block in blocks
            ]
            state.tally.zeroed(state.tables.reallocated([*fact.reallocated, *grown]))
        if state.epoch:
            self._separate_grown(fact)
        for request, confirmed_tokens, new_blocks, new_keys in fact.progress:
            record = state.requests.live.get(request)
            if record is None or record.state is not _RUNNING:
                self.state.tally.rejected(RejectionCause.UNKNOWN_REQUEST, request)
                continue
            if record.reserved:
                state.requests.needs_no_load(record)
            if new_blocks:
                state.tables.extended(record, new_blocks)
            if new_keys:
                record.extend_keys(new_keys)
            record.confirmed_tokens = max(confirmed_tokens, record.confirmed_tokens)
            advanced.append(record)
        return advanced

    def _offer_states(self, fact: facts.StepScheduled) -> None:
        """Offer the recurrent states that a step hands off, before other blocks: a prefix needs its state to hit.

        Call this method after the step's block tables have been updated and stale entries zeroed.
        """
        offers: list[Offer] = []
        groups = len(self.state.shape.groups)
        for request, group, position, key, block in fact.states:
            record = self.state.requests.live.get(request)
            if record is None or record.state is not _RUNNING:
                self.stores.refuse([Offer((key,), (block,))], StoreOutcome.REQUEST_GONE)
                continue
            if record.keys[group][position : position + 1] != [key]:
                self.stores.refuse([Offer((key,), (block,))], StoreOutcome.STALE)
                continue
            end = (position + 1) * self.state.shape.groups[group].block_tokens
            limit = record.limits.store_tokens
            if limit is not None and end > limit:
                self.stores.refuse([Offer((key,), (block,))], record.limits.counts_as)
                continue
            self.state.tables.put(record, group, position, block)
            place = position * groups + group
            offers.append(Offer((key,), (block,), record, record.incarnation, (place,)))
            if end == record.boundary:
                self._hits.boundary_stored(record)
        self._planner.states(offers)
        if fact.tails:
            self._offer_tails(fact.tails)

    def _offer_tails(self, tails: Iterable[facts.TailHandedOff]) -> None:
        """Offer the blocks of tails. Such an offer never waits: the engine soon reuses or fills the blocks."""
        offers: dict[BlockKey, Offer] = {}  # without a request, so that the offers cannot wait
        for tail in tails:
            refused = self._refuses(tail)
            if refused is not None:
                self.stores.refuse([Offer((tail.key,), (tail.block,))], refused)
                continue
            record = self.state.requests.live[tail.request]
            record.tail = tail.tokens
            offers[tail.key] = Offer((tail.key,), (tail.block,))
            for key, block in self._attention_of(record, tail.tokens):
                offers[key] = Offer((key,), (block,))
        self._planner.tails(list(offers.values()))

    def _refuses(self, tail: facts.TailHandedOff) -> StoreOutcome | None:
        """Return why a tail must not be stored, or None."""
        record, shape = self.state.requests.live.get(tail.request), self.state.shape
        if record is None or record.state is not _RUNNING:
            return StoreOutcome.REQUEST_GONE
        if tail.key != shape.tail_key(shape.groups[tail.group], record.hashes, tail.tokens):
            return StoreOutcome.STALE
        if record.limits.store_tokens is not None and tail.tokens > record.limits.store_tokens:
            return record.limits.counts_as
        return None if record.may_store else StoreOutcome.BEFORE_RESET

    def _attention_of(self, record: RequestRecord, tokens: int) -> Iterator[tuple[BlockKey, DeviceBlockId]]:
        """Yield the keys and blocks of full attention that contain the end of a request's first `tokens` tokens.

        A block counts only if the engine's own hash of it covers these tokens (R7): the tail's, or the whole block's.
        """
        shape = self.state.shape
        for group, table, keys in zip(shape.groups, record.table or (), record.keys, strict=False):
            position = tokens // group.block_tokens
            key = shape.tail_key(group, record.hashes, tokens)
            if group.kind is AttentionKind.FULL and key is not None and position < len(table):
                (held,) = self.state.device.keys_of((table[position],))
                if held is not None and held in (key, *keys[position : position + 1]):
                    yield key, table[position]

    # -- reports ------------------------------------------------------------------------------------------------

    def job_overdue(self, fact: facts.JobOverdue) -> None:
        """Stop waiting for a job after its time limit, and quarantine the slots that it may still write (R16)."""
        state, job = self.state, self.state.jobs.open.get(fact.job)
        if isinstance(job, DeviceJob) and job.state is JobState.SUBMITTED:
            state.tally.events += state.stall.timed_out(job)
            state.tally.events.append(events.JobAbandoned(job.id, job.direction, len(job.slots)))
            for record in job.concerns:
                record.has_timed_out = True
                state.retention.release_if_over(record)
        state.overdue(fact.job)

    # -- resets, and the end of offloading ------------------------------------------------------------------------

    def cache_reset(self, _: facts.CacheReset) -> None:
        """Discard all blocks, so that lookups find nothing computed before the reset (R10)."""
        state = self.state
        state.computed_since_reset.clear()
        live = tuple(state.requests.live.values())
        for record in live:
            self._hits.drop(record, PinDropCause.RESET)
            record.may_store = False
            self.stores.evictions.forget(record)
            state.requests.load_is_over(record)
        for record in (*live, *state.requests.finishing):
            state.retention.release(record)
        self.tier_store.reset()
        self.stores.stop(StoreOutcome.BEFORE_RESET)

    def invariant_broken(self, fact: facts.InvariantBroken) -> None:
        """Switch offloading off until the engine restarts (R12). No new job starts; submitted jobs run to their end."""
        state = self.state
        if state.degraded is not None:
            return
        state.degraded = fact.cause
        state.tally.events.append(events.OffloadingDegraded(fact.cause, fact.detail))
        # After a handler has raised, the core gets no more reports, so running loads are dropped, too.
        is_last = fact.cause is DegradeCause.HANDLER_RAISED
        for job in tuple(state.jobs.open.values()):
            if is_last or job.state is JobState.PLANNED or not isinstance(job, Load):
                state.jobs.drop(job)
        self.tier_store.stop()
        state.jobs.cancel_nothing()
        self.stores.stop(StoreOutcome.DEGRADED)

    # -- the store policy -----------------------------------------------------------------------------------------

    def policy_chosen(self, fact: facts.StorePolicyChosen) -> None:
        """Store by another policy from now on, unless this policy is not allowed any more."""
        was, policy = self._planner.name, fact.policy
        if policy != was and policy in self.policies:
            self._planner = self._loads.planner = make_planner(self.state, self.stores, policy)
            self.state.tally.events.append(events.StorePolicyMoved(was, policy, fact.found))

    # -- queries; they change nothing -----------------------------------------------------------------------------

    @property
    def store_policy(self) -> str:
        """Return the store policy in use."""
        return self._planner.name

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the store policies among which `auto` may choose now."""
        return policies_for(self.state)

    @property
    def has_work(self) -> bool:
        """Return whether the engine must keep stepping until open work ends. Timed-out copies do not count (R16)."""
        return self._has_work(self.state.jobs.pending) or (bool(self.state.tiers) and self.tier_store.is_due)

    @property
    def has_host_work(self) -> bool:
        """Return what `has_work` would return without lower tiers."""
        return self._has_work(self.state.jobs.pending - self.state.jobs.pending_on_tiers)

    def _has_work(self, jobs: int) -> bool:
        results = self.state.results
        return bool(jobs or results.loaded or results.failed or self.stores.again)

    @property
    def watches_blocks(self) -> bool:
        """Return whether steps must report all newly allocated blocks, even of requests that report progress later."""
        tables = self.state.tables
        return bool(tables.entries or tables.shared or self.state.epoch)

    def boundary(self, request: RequestId) -> int:
        """Return after how many tokens the engine should hand off a request's recurrent states; 0 for never."""
        record = self.state.requests.live.get(request)
        return 0 if record is None else record.boundary

    def audit(self) -> list[str]:
        """Return one line of text for each wrong total."""
        return audit(self.state, self.stores)

    # -- device blocks that were allocated ------------------------------------------------------------------------

    def _reallocated(self, fact: facts.BlocksAllocated, *, since_reset: bool) -> None:
        """Zero an allocation's new blocks in other tables. After a reset, record whether these blocks may be stored."""
        state, had = self.state, fact.device_tokens
        blocks: list[DeviceBlockId] = []
        for group, table in zip(state.shape.groups, fact.tables, strict=True):
            blocks += table[-(-had // group.block_tokens) :]
        if state.tables.entries or state.tables.shared:
            state.tally.zeroed(state.tables.reallocated(blocks))
        if state.epoch:
            self._separate(blocks, since_reset=since_reset)

    def _separate_grown(self, fact: facts.StepScheduled) -> None:
        self._separate(fact.reallocated, since_reset=False)
        for progress in fact.progress:
            record = self.state.requests.live.get(progress.request)
            since_reset = record is not None and record.may_store
            for blocks in progress.new_blocks:
                self._separate(blocks, since_reset=since_reset)
        for source, target in fact.copies:
            self._separate((target,), since_reset=source in self.state.computed_since_reset)

    def _separate(self, blocks: Iterable[DeviceBlockId], *, since_reset: bool) -> None:
        """Record whether the KV that requests compute into these blocks is from after the last reset."""
        fresh = self.state.computed_since_reset
        if since_reset:
            fresh.update(blocks)
            fresh.discard(NULL_BLOCK)
        else:
            fresh.difference_update(blocks)

    def _is_untainted(self, fact: facts.BlocksAllocated) -> bool:
        """Return whether all blocks of the device's own hit were computed after the last reset (R10)."""
        fresh = self.state.computed_since_reset
        return all(
            block == NULL_BLOCK or block in fresh
            for group, table in zip(self.state.shape.groups, fact.tables, strict=True)
            for block in table[: fact.device_tokens // group.block_tokens]
        )


_HANDLERS: Mapping[type[facts.Fact], Callable[[OffloadCore, Any], None]] = {
    facts.RequestSeen: OffloadCore.request_seen,
    facts.BlocksAllocated: OffloadCore.blocks_allocated,
    facts.StepScheduled: OffloadCore.step_scheduled,
    facts.RequestEnded: OffloadCore.request_ended,
    facts.JobOverdue: OffloadCore.job_overdue,
    facts.CacheReset: OffloadCore.cache_reset,
    facts.InvariantBroken: OffloadCore.invariant_broken,
    facts.StorePolicyChosen: OffloadCore.policy_chosen,
    facts.TierAnswered: lambda core, fact: core.lower_tiers.answered(fact),
}
