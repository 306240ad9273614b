"""The scheduler's side of offloading: an adapter's hooks go in here, and the parts are wired behind it.

Every hook publishes a fact on the bus, where the core's handlers react inline and in order; then the core's events are
published, for counters, the journal and every other observer. Questions (a lookup, a step's plan) are calls on the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvoffload.bus.bus import Bus
from kvoffload.core.offload_core import OffloadCore
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
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.conservation import Conservation
from kvoffload.runtime.deadlines import JobDeadlines, Patience
from kvoffload.runtime.degradation import Degradation
from kvoffload.runtime.gauges import copies_under_way, read_gauges
from kvoffload.runtime.hooks import HookTimes
from kvoffload.runtime.observers import Observers
from kvoffload.runtime.pin_ages import PinAges
from kvoffload.runtime.policy import policy_of
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.resets import Resets
from kvoffload.runtime.store_shares import StoreShares
from kvoffload.runtime.watchdog import Watchdog
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.first_tokens import FirstTokens, HasToken
from kvoffload.telemetry.gauges import GaugeSnapshot
from kvoffload.telemetry.journal import Journal
from kvoffload.telemetry.net_benefit import NetBenefit
from kvoffload.telemetry.spans import make_spans

T = TypeVar("T")

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
        timeout_s, now = config.transfer_timeout_s, self._clocks.monotonic
        self.shape = shape
        self._spans = make_spans(config, shape, self._clocks.unix)
        self.journal = Journal(self._clocks.unix, path=config.journal_path, on_failure=self._journal_failed)
        self.core = OffloadCore(shape, policy_of(config, shape, merge_steps), device)
        self._take_events, self._jobs = self.core.state.outbox.take, self.core.state.jobs
        self.bus = Bus()
        self.counters = Counters()
        self._hooks = HookTimes(self.counters, self._clocks.precise)
        self._deadlines = JobDeadlines(self._clocks, timeout_s, self._jobs.get)
        self._patience = Patience(timeout_s)
        self._awaited = AwaitedLoads(timeout_s)
        self._conservation = Conservation(self.core, device, self.counters, self._tell)
        self._degradation = Degradation(self.journal, config.journal_path, now, timeout_s)
        self._pins = PinAges(self._clocks)
        self._resets, self._shares = Resets(self._jobs, self.bus.publish), StoreShares()
        copying = partial(copies_under_way, self.core.state)
        self.benefit = NetBenefit(shape.alignment, shape.ranks, copying, now)
        self._first_tokens = FirstTokens(now)
        self._chooses_least = config.min_load_tokens == AUTO
        self._wire(portal)
        self._observers = Observers(self.bus, self.journal, self.counters, now, self._spans)
        if portal is not None:
            self._observers.start(portal, Watchdog(self._pins, self._deadlines, timeout_s, now))

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
                self._awaited.began(fact.request, self._clocks.monotonic())
            self._tell(fact)

    def step(self, fact: facts.StepScheduled) -> TransferPlan:
        """The engine scheduled a step: return what the workers must copy. Exactly once a step."""
        with self._hooks.step:
            now = self._clocks.monotonic()
            if self._first_tokens.admitted:
                self._first_tokens.look()
            if self._deadlines.oldest is not None:
                for job in self._deadlines.overdue(now):
                    self._tell(facts.JobOverdue(job))
            if self._resets.draining:
                self._resets.look()
            self.bus.publish(fact)
            plan = self._plan(now) if self._jobs.planned else NOTHING
            self._publish_events()
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
            self._ask("audit", self._conservation.at_rest, None)

    def reported(self, reports: Sequence[TransferReport]) -> LoadResults:
        """Ranks told what ended; return the loads that the engine must hear of."""
        with self._hooks.report:
            for report in reports:
                self._tell(facts.TransferReported(report))
            if reports:
                self._deadlines.forget_ended()
                self._resets.look()
                self._ask("audit", self._conservation.at_rest, None)
            return self.take_results()

    def take_results(self) -> LoadResults:
        """Return the loads that ended since the last call; some end without a report."""
        results = self._awaited.heard(self._ask("take_results", self.core.take_results, LoadResults()))
        if self._awaited and self.core.state.degraded is not None:
            open_loads = {job.request[0] for job in self._jobs.all() if job.request is not None}
            results.failed += self._awaited.give_up(open_loads, self._clocks.monotonic())
        return results

    @property
    def has_results(self) -> bool:
        """Whether `take_results` could have anything to tell."""
        state = self.core.state
        return bool(state.results.loaded or state.results.failed) or state.degraded is not None

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
            return self.core.is_drained

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
            answer = _NO_TOKENS
            try:
                answer = self.core.lookup(
                    request,
                    device_tokens,
                    may_wait=may_wait,
                    tokens=tokens,
                    new_keys=new_keys,
                    least_tokens=least,
                )
            except Exception as error:
                self._core_raised(error, "lookup")
            if answer is None:
                self._patience.waits(request, now)
            self._publish_events()
            return answer

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping for something to end."""
        return bool(self._awaited) or (self.core.has_work and not self._degradation.is_hopeless)

    # -- what operators ask -------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Return every violated conservation law; a violation switches offloading off (R12).

        On the engine's thread, between two hooks. Costs time in the size of the pool; at rest a cheaper one is made
        each time without being asked for.
        """
        return self._conservation.in_full()

    def gauges(self) -> GaugeSnapshot:
        """Return the state now. Reads single numbers only, so any thread may ask."""
        watchers = self._pins, self._deadlines, self._resets, self._shares, self.benefit
        return read_gauges(self.core.state, self.bus, *watchers)

    def close(self) -> None:
        """Stop the observers. Open jobs are the workers' to drain."""
        self.bus.close()
        self._observers.wait()

    # -- inside -------------------------------------------------------------------------------------------------

    def _wire(self, portal: Portal | None) -> None:
        for fact, handler in self.core.handlers():
            self.bus.on(fact, handler)
        self.bus.on_state_error(lambda error, fact: self._core_raised(error, type(fact).__name__))
        for watcher in (self.counters, self._pins, self.benefit, self._resets, self._shares, self.journal):
            watcher.subscribe(self.bus)
        self._first_tokens.subscribe(self.bus)
        self._degradation.subscribe(self.bus, portal)

    def _tell(self, fact: facts.Fact) -> None:
        self.bus.publish(fact)
        self._publish_events()

    def _plan(self, now: float) -> TransferPlan:
        """Ask for the step's plan and begin its jobs' deadlines."""
        plan = self._ask("plan", self.core.plan, None)
        if plan is None:
            # What the core counts as submitted no worker will ever see: it ends as overdue.
            self._deadlines.submitted((job.job for job in self._jobs.all()), now)
            return NOTHING
        self._deadlines.submitted((job.job for job in plan.jobs), now)
        return plan

    def _ask(self, name: str, question: Callable[[], T], otherwise: T) -> T:
        """Ask the core; should it raise, switch offloading off and go on without it (R12)."""
        try:
            return question()
        except Exception as error:
            self._core_raised(error, name)
            return otherwise

    def _publish_events(self) -> None:
        for event in self._take_events():
            self.bus.publish(event)

    def _core_raised(self, error: Exception, doing: str) -> None:
        if self.core.state.degraded is None:
            log.error("core_raised", error=repr(error), doing=doing, exc_info=error)
            self.bus.publish(facts.LawBroken(DegradeCause.HANDLER_RAISED, repr(error)))

    def _journal_failed(self, error: Exception) -> None:
        self.counters.journal_failed()
        log.error("journal_stopped", error=str(error), note="the engine and the ring in memory go on")
