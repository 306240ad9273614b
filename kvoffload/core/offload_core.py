"""The core of one engine's scheduler side: facts in, answers and events out.

Pure: no torch, no clock, no thread, no logging, no randomness. The same facts in the same order give the same answers,
and the whole can be copied and compared, which is how it is explored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvoffload.core.audit import audit, audit_at_rest
from kvoffload.core.check_desk import CheckDesk
from kvoffload.core.fingerprint import fingerprint
from kvoffload.core.intake import Intake
from kvoffload.core.load_desk import LoadDesk
from kvoffload.core.lookup_desk import LookupDesk
from kvoffload.core.offer_book import OfferBook
from kvoffload.core.offers import Offer
from kvoffload.core.planners import make_planner
from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState, LoadResults, Policy
from kvoffload.core.states import RequestState, SlotState
from kvoffload.core.store_desk import StoreDesk
from kvoffload.core.transfers import Transfers
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause, EvictionCause, StoreOutcome
from kvoffload.model.engine import Device, EngineShape
from kvoffload.model.events import Event, OffloadingDegraded, ResetStarted
from kvoffload.model.ids import BlockKey, RequestId, SlotId
from kvoffload.model.transfer import NOTHING, TransferPlan

Handler = Callable[[Any], None]


class OffloadCore:
    """Decides what is stored, found, loaded and evicted.

    Args:
        shape: the engine's fixed facts.
        policy: what the operator chose.
        device: what the engine lends.
    """

    def __init__(self, shape: EngineShape, policy: Policy, device: Device) -> None:
        self.state = CoreState(shape, policy, device)
        self._book = OfferBook(self.state)
        self._stores = StoreDesk(self.state, self._book)
        self._intake = Intake(self.state)
        self._checks = CheckDesk(self.state)
        self._lookups = LookupDesk(self.state, self._checks)
        self._loads = LoadDesk(self.state, self._lookups)
        self._planner = make_planner(self.state, self._stores)
        self._transfers = Transfers(self.state, self._stores, self._loads, self._checks, self._planner)

    def handlers(self) -> tuple[tuple[type[facts.Fact], Handler], ...]:
        """Return who reacts to which fact, in the order in which they must.

        The order matters where two handlers react to one fact: what leaves a table is settled before the table goes,
        and ids that were handed out are struck before any block of the step is offered.
        """
        return (
            (facts.RequestSeen, self._intake.on_seen),
            (facts.BlocksAllocated, self._intake.on_allocated),
            (facts.BlocksAllocated, self._loads.on_allocated),
            (facts.BlocksAllocated, self._on_allocated),
            (facts.StepScheduled, self._on_step),
            (facts.StatesHandedOff, self._on_states),
            (facts.RequestEnded, self._on_ending),
            (facts.RequestEnded, self._intake.on_ended),
            (facts.TransferReported, self._transfers.on_reported),
            (facts.JobOverdue, self._transfers.on_overdue),
            (facts.RankLost, self._transfers.on_rank_lost),
            (facts.CacheReset, self._on_reset),
            (facts.LawBroken, self._on_law_broken),
        )

    # -- questions ----------------------------------------------------------------------------------------------

    def lookup(
        self,
        request: RequestId,
        device_tokens: int,
        *,
        may_wait: bool,
        tokens: int = 0,
        new_keys: Sequence[Sequence[BlockKey]] = (),
        least_tokens: int = 0,
    ) -> int | None:
        """Return the tokens that the host adds to the device's hit; None for "not yet".

        Changes state: what is found stays pinned until the matching allocation, the next lookup, the request's end or
        a reset. An engine looks up only requests without a block table, so asking for a running one says that it was
        preempted.

        Args:
            request: whose prefix.
            device_tokens: tokens that the device holds.
            may_wait: "not yet" is an answer.
            tokens: what a preempted request must hold before its next new token: its prompt and what it generated.
            new_keys: per group, keys of whole blocks not told before.
            least_tokens: shorter hits are declined, where this is above the policy's number; a request's first lookup
                decides for it.
        """
        record = self.state.requests.live(request)
        if record is not None and record.state is RequestState.RUNNING:
            self._preempt(request)
        if record is not None:
            record.extend_keys(new_keys)
            record.prompt_tokens = max(record.prompt_tokens, tokens)
            if not record.least_tokens:
                record.least_tokens = max(least_tokens, self.state.policy.min_load_tokens)
        return self._lookups.lookup(
            request, device_tokens, may_wait=may_wait and self.state.shape.promises.can_wait
        )

    def plan(self) -> TransferPlan:
        """Return what the workers must copy or check, decided since the last call. Changes state: it counts as submitted."""
        if not self.state.jobs.planned:
            return NOTHING
        desks = self._loads, self._stores, self._checks
        loads, stores, checks = [tuple([job.as_transfer() for job in desk.planned]) for desk in desks]
        plan = TransferPlan(loads, stores, checks)
        # Only now do jobs count as submitted: what raises above leaves them to be cancelled.
        for desk in desks:
            desk.submit()
        return plan

    def take_results(self) -> LoadResults:
        """Return the loads that ended since the last call. Changes state."""
        results, self.state.results = self.state.results, LoadResults()
        return results

    def take_events(self) -> list[Event]:
        """Return what happened since the last call, in order. Changes state."""
        return self.state.outbox.take()

    @property
    def has_work(self) -> bool:
        """Whether steps are needed for something to come to its end. Abandoned copies do not count (R16)."""
        state = self.state
        return bool(
            state.jobs.pending or state.results.loaded or state.results.failed or self._book.has_again
        )

    @property
    def is_drained(self) -> bool:
        """Whether no copy is under way that was not given up; what a reset left behind is gone then."""
        return not self.state.jobs.pending

    @property
    def is_at_rest(self) -> bool:
        """Whether no request is known, and no copy that anyone waits for."""
        return not (self.state.jobs.pending or self.state.requests)

    def audit(self) -> list[str]:
        """Return every violated conservation law as text. Reads only."""
        return audit(self.state, self._book, self._stores.leased_blocks)

    def audit_at_rest(self, slots: Iterable[SlotId]) -> list[str]:
        """Return the laws that are violated while `is_at_rest`, looking at these slots one by one. Reads only."""
        return audit_at_rest(self.state, self._book, self._stores.leased_blocks, slots)

    def fingerprint(self) -> object:
        """Return a hashable value that is equal for equal states. Reads only."""
        return fingerprint(self)

    # -- reactions that concern several owners ------------------------------------------------------------------

    def _on_allocated(self, fact: facts.BlocksAllocated) -> None:
        record = self.state.requests.live(fact.request)
        if record is not None and record.has_table:
            self._planner.allocated(record)

    def _preempt(self, request: RequestId) -> None:
        record = self.state.requests.live(request)
        if record is not None and record.state is RequestState.RUNNING:
            self._planner.preempted(record)
            self._stores.lost_table(record)
            self._intake.preempted(record)

    def _on_step(self, fact: facts.StepScheduled) -> None:
        """Preempted requests first: their blocks may have been handed out in this very step."""
        for request in fact.preempted:
            # One that was preempted and given blocks again within a step is told only now.
            if not self._intake.is_newly_allocated(request):
                self._preempt(request)
        self._intake.on_step(fact)
        if self.state.degraded is None:
            self._stores.next_step()
            self._planner.step(fact)

    def _on_states(self, fact: facts.StatesHandedOff) -> None:
        self._stores.offer([Offer(key, block) for key, block in fact.states], last_chance=True)

    def _on_ending(self, fact: facts.RequestEnded) -> None:
        record = self.state.requests.live(fact.request)
        if record is None:
            return
        if record.state is RequestState.RUNNING:
            self._last_offers(record, fact)
        self._book.settle_unsettled(record, StoreOutcome.REQUEST_GONE)
        self._loads.on_request_ended(record)

    def _last_offers(self, record: RequestRecord, fact: facts.RequestEnded) -> None:
        if not fact.holds_blocks:
            self._planner.preempted(record)
            return
        record.extend_keys(fact.new_keys)
        record.confirmed_tokens = max(record.confirmed_tokens, fact.confirmed_tokens)
        self._planner.ending(record)

    def _on_reset(self, fact: facts.CacheReset) -> None:
        """Nothing computed so far is ever found again (R10)."""
        state = self.state
        state.generation += 1
        state.computed_since_reset.clear()
        self._lookups.reset()
        for record in state.requests.all_live():
            record.stores = False
        for record in (*state.requests.all_live(), *state.requests.finishing()):
            state.holds.let_go(record)
        dropped = state.pool.forget_all()
        state.misses.reset(dropped)
        state.restores.forget_all()
        state.shared.forget_all()
        self._stores.stop(StoreOutcome.BEFORE_RESET, planned=StoreOutcome.CANCELLED)
        state.outbox.evicted(EvictionCause.RESET, len(dropped))
        draining = state.pool.count(SlotState.DRAINING)
        state.outbox.put(ResetStarted(state.generation, len(dropped), draining, state.jobs.pending))

    def _on_law_broken(self, fact: facts.LawBroken) -> None:
        """Off for good: nothing new starts, what is under way drains, and the engine goes on (R12)."""
        if self.state.degraded is not None:
            return
        self.state.degraded = fact.cause
        self.state.outbox.put(OffloadingDegraded(fact.cause, fact.detail))
        self._loads.cancel_planned()
        if fact.cause is DegradeCause.HANDLER_RAISED:  # the last fact that this is told
            self._loads.fail_open()
        self._checks.cancel_planned()
        self._stores.stop(StoreOutcome.DEGRADED, planned=StoreOutcome.DEGRADED)
