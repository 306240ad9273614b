"""The scheduler's side of offloading: an adapter's hooks go in here, and the parts are wired behind it.

Every hook publishes a fact on the bus, where the core's handlers react inline and in order; then the core's events are
published, for counters, the journal and every other observer. Questions (a lookup, a step's plan) are calls on the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvoffload.bus.bus import Bus
from kvoffload.core.state import LoadResults
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause
from kvoffload.model.config import AUTO, OffloadConfig
from kvoffload.model.engine import Device, EngineShape
from kvoffload.model.errors import EngineContractError
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.model.transfer import NOTHING, TransferPlan, TransferReport
from kvoffload.runtime.awaited_loads import AwaitedLoads
from kvoffload.runtime.broken_core import BrokenCore
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.conservation import Conservation
from kvoffload.runtime.deadlines import Patience
from kvoffload.runtime.degradation import Degradation
from kvoffload.runtime.gauges import copies_under_way, read_gauges
from kvoffload.runtime.hooks import HookTimes
from kvoffload.runtime.observers import Observers
from kvoffload.runtime.open_copies import OpenCopies
from kvoffload.runtime.pin_ages import PinAges
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.recording import make_core, make_journal, policy_of
from kvoffload.runtime.resets import Resets
from kvoffload.runtime.store_shares import StoreShares
from kvoffload.runtime.watchdog import Watchdog
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.first_tokens import FirstTokens, HasToken
from kvoffload.telemetry.gauges import GaugeSnapshot
from kvoffload.telemetry.net_benefit import NetBenefit
from kvoffload.telemetry.spans import make_spans

log = get_logger("scheduler")

_NO_TOKENS: int | None = 0


class SchedulerSide:
    """Offloading for one engine, on its scheduler's thread.

    Args:
        shape: the engine's fixed facts.
        config: the operator's settings.
        device: what the engine lends.
        portal: the thread for observers; None runs without any (the journal's ring and the counters are inline).
        clocks: where time comes from.
        merge_steps: steps over which a decoding batch's stores may be collected into one job, at least 1.

    Raises:
        EngineContractError: the engine promises too little.
        ConfigError: the journal's file cannot be written, or what spans need is not installed.
    """

    def __init__(
        self,
        shape: EngineShape,
        config: OffloadConfig,
        device: Device,
        *,
        portal: Portal | None = None,
        clocks: Clocks | None = None,
        merge_steps: int = 1,
    ) -> None:
        if not shape.promises.can_lease:
            raise EngineContractError(
                "the engine must be able to lease device blocks: a copy reads and writes them"
            )
        self._clocks = clocks or Clocks()
        timeout_s, now, self.shape = config.transfer_timeout_s, self._clocks.monotonic, shape
        self._spans = make_spans(config, shape, self._clocks.unix)
        self.journal = make_journal(config, self._clocks.unix, self._journal_failed)
        self.core = make_core(shape, policy_of(config, shape, merge_steps), device, self.journal)
        self._take_events, self._jobs = self.core.state.outbox.take, self.core.state.jobs
        self.bus = Bus()
        self.counters = Counters()
        self._hooks = HookTimes(self.counters, self._clocks.precise)
        self._copies = OpenCopies(shape.ranks, self._clocks, timeout_s)
        self._patience = Patience(timeout_s)
        self._awaited = AwaitedLoads()
        self._degradation = Degradation(self.journal, config.journal_path)
        self._pins = PinAges(self._clocks)
        self._resets, self._shares = Resets(self._jobs, self.bus.publish), StoreShares()
        self._broken = BrokenCore(self.core, self.bus, self._copies, (self._pins, self._resets))
        self._conservation = Conservation(self.core, device, self.counters, self._tell, self._broken)
        copying = partial(copies_under_way, self._copies)
        self.benefit = NetBenefit(shape.alignment, shape.ranks, copying, now)
        self._first_tokens = FirstTokens(now)
        self._chooses_least = config.min_load_tokens == AUTO
        self._wire(portal)
        self._observers = Observers(self.bus, self.journal, self.counters, now, self._spans)
        if portal is not None:
            self._observers.start(portal, Watchdog(self._pins, self._copies, timeout_s, now))

    # -- what the engine tells ----------------------------------------------------------------------------------

    def seen(
        self, fact: facts.RequestSeen, has_token: HasToken | None = None, trace_parent: str | None = None
    ) -> None:
        """The engine took a request in; `has_token` says whether its first token is there, `trace_parent` is W3C's."""
        with self._hooks.seen:
            if has_token is not None:
                self._first_tokens.seen(fact.request, has_token)
            if self._spans is not None:
                self._spans.trace_parent = trace_parent
            self._tell(fact)

    def allocated(self, fact: facts.BlocksAllocated) -> None:
        """The engine gave a request a block table."""
        with self._hooks.allocated:
            self._patience.over(fact.request)
            if fact.external_tokens:
                self._awaited.began(fact.request)
            self._tell(fact)

    def step(self, fact: facts.StepScheduled) -> TransferPlan:
        """The engine scheduled a step: return what the workers must copy. Exactly once a step."""
        with self._hooks.step:
            now = self._clocks.monotonic()
            if self._first_tokens.admitted:
                self._first_tokens.look()
            if self._copies.are_pending:
                for job in self._copies.overdue(now):
                    self._tell(facts.JobOverdue(job))
            if self._resets.draining:
                self._broken.ask("step", self._resets.look, None)
            self.bus.publish(fact)
            plan = self._broken.ask("plan", self.core.plan, NOTHING) if self._jobs.planned else NOTHING
            self._publish_events()
            if plan is not NOTHING:
                plan = self._submitted(plan, now)
        self._hooks.step_ended()
        return plan

    def states_handed_off(self, fact: facts.StatesHandedOff) -> None:
        """The engine offers recurrent states."""
        with self._hooks.offer:
            self._tell(fact)

    def ended(self, fact: facts.RequestEnded) -> None:
        """A request finished or was aborted, and still has its blocks."""
        with self._hooks.ended:
            self._patience.over(fact.request)
            self._tell(fact)
            self._broken.ask("audit", self._conservation.at_rest, None)

    def reported(self, reports: Sequence[TransferReport]) -> LoadResults:
        """Ranks told what ended; return the loads that the engine must hear of."""
        with self._hooks.report:
            for report in reports:
                self._copies.reported(report)
                self._tell(facts.TransferReported(report))
            if reports:
                self._broken.ask("report", self._resets.look, None)
                self._broken.ask("audit", self._conservation.at_rest, None)
                if self._broken.is_off:
                    self._broken.give_back()
            return self.take_results()

    def take_results(self) -> LoadResults:
        """Return the loads that ended since the last call; some end without a report."""
        ended = self._broken.ask("take_results", self.core.take_results, LoadResults())
        results = self._awaited.answered(ended)
        # A core that found a law broken still answers for what the workers have, but for nothing else.
        is_last = self._degradation.cause is not None and not self._copies.are_pending
        if self._awaited and (is_last or self._broken.is_off):
            results.failed += self._awaited.give_up()
        return results

    @property
    def has_results(self) -> bool:
        """Whether `take_results` could have anything to tell."""
        results = self.core.state.results
        return bool(results.loaded or results.failed) or self._degradation.cause is not None

    def rank_lost(self, fact: facts.RankLost) -> None:
        """A rank will not report again."""
        self._tell(fact)

    def reset(self) -> bool:
        """Find nothing computed so far ever again, at once; return whether no copy of before is left running.

        The answer is the metric `kvoffload_reset_draining_jobs` being 0, and the log's `reset_started` telling of no
        open job; when the last of them has ended, `reset_ended` says so. Asking again is harmless.
        """
        with self._hooks.reset:
            self._tell(facts.CacheReset())
            is_drained = self._broken.ask("reset", lambda: self.core.is_drained, None)
            return not self._copies.are_pending if is_drained is None else is_drained

    # -- what the engine asks -----------------------------------------------------------------------------------

    def lookup(
        self,
        request: RequestId,
        device_tokens: int,
        tokens: int = 0,
        new_keys: Sequence[Sequence[BlockKey]] = (),
    ) -> int | None:
        """Return the tokens that the host adds to `device_tokens`, or None for "not yet". Any number of times.

        `tokens` is what the request must hold before its next new token, where that is more than its prompt;
        `new_keys` are keys of its whole blocks that were not told before.
        """
        with self._hooks.lookup:
            now = self._clocks.monotonic()
            may_wait = self._patience.may_wait(request, now)
            least = self.benefit.least_load_tokens() if self._chooses_least else 0
            asked = partial(self.core.lookup, may_wait=may_wait, tokens=tokens, new_keys=new_keys)
            look_up = partial(asked, request, device_tokens, least_tokens=least)
            answer = self._broken.ask("lookup", look_up, _NO_TOKENS)
            if answer is None:
                self._patience.waits(request, now)
            self._publish_events()
            return answer if self._broken.error is None else 0

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping for something to end."""
        if self._awaited:
            return True
        if self._degradation.cause is None:
            try:
                return self.core.has_work
            except Exception as error:
                self._broken.raised(error, "has_work")
                self._broken.cut_off()
        return self._copies.are_pending

    # -- what operators ask -------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Return every violated conservation law; a violation switches offloading off (R12).

        On the engine's thread, between two hooks. Costs time in the size of the pool; at rest a cheaper one is made
        each time without being asked for.
        """
        return self._conservation.in_full()

    def gauges(self) -> GaugeSnapshot:
        """Return the state now. Reads single numbers only, so any thread may ask."""
        watchers = self._pins, self._copies, self._resets, self._shares, self.benefit
        try:
            return read_gauges(self.core.state, self.bus, *watchers, self._degradation.cause)
        except Exception as error:
            self._broken.raised(error, "gauges")  # the engine's thread cuts it off with its next hook
            return GaugeSnapshot(degraded=DegradeCause.HANDLER_RAISED)

    def close(self) -> None:
        """Stop the observers. Open jobs are the workers' to drain."""
        self.bus.close()
        self._observers.wait()

    # -- inside -------------------------------------------------------------------------------------------------

    def _wire(self, portal: Portal | None) -> None:
        for fact, handler in self.core.handlers():
            self.bus.on(fact, handler)
        self.bus.on_state_error(lambda error, fact: self._broken.raised(error, type(fact).__name__))
        for watcher in (self.counters, self._pins, self.benefit, self._resets, self._shares, self.journal):
            watcher.subscribe(self.bus)
        self._first_tokens.subscribe(self.bus)
        self._degradation.subscribe(self.bus, portal)

    def _tell(self, fact: facts.Fact) -> None:
        self.bus.publish(fact)
        self._publish_events()

    def _submitted(self, plan: TransferPlan, now: float) -> TransferPlan:
        """Begin the deadlines of a plan's jobs; of a core that raised while it made the plan nothing is submitted."""
        if self._broken.error is not None:
            return NOTHING
        self._copies.submitted(plan.jobs, now)
        return plan

    def _publish_events(self) -> None:
        """A hook's last call: tell what the core made of it, and cut the core off if it has raised."""
        try:
            events = self._take_events()
        except Exception as error:
            events = []
            self._broken.raised(error, "take_events")
        for event in events:
            self.bus.publish(event)
        if self._broken.is_due:
            self._broken.cut_off()

    def _journal_failed(self, error: Exception) -> None:
        self.counters.journal_failed()
        log.error("journal_stopped", error=str(error), note="the engine and the ring in memory go on")
