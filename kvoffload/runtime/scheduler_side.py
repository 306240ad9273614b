"""The scheduler's side of offloading: an adapter's hooks call in here, and the parts are wired behind it.

Each hook dispatches one fact on the bus, where its one state handler, a method of the core, reacts inline; the fact and the
core's events then reach counters, the journal and every other observer in one batch. Questions (a lookup, a step's plan)
are calls on the core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvoffload.bus.bus import Bus
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import LoadResults, Policy
from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.tier_key import TierKey
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause
from kvoffload.model.config import AUTO, OffloadConfig, check_promises
from kvoffload.model.engine import BlockPool, EngineIdentity, EngineShape
from kvoffload.model.errors import ConfigError
from kvoffload.model.events import Event
from kvoffload.model.ids import BlockKey, Rank, RequestId
from kvoffload.model.transfer import NOTHING, TransferPlan, TransferReport
from kvoffload.remote.address import RemotePlace
from kvoffload.runtime.awaited_loads import NO_ANSWERS, AwaitedLoads, LoadAnswers
from kvoffload.runtime.benefit import NetBenefit
from kvoffload.runtime.broken_core import BrokenCore
from kvoffload.runtime.clocks import Clocks
from kvoffload.runtime.conservation import Conservation
from kvoffload.runtime.degradation import Degradation
from kvoffload.runtime.disk_index import DiskIndex
from kvoffload.runtime.host_memory import HostMemory
from kvoffload.runtime.lower_tiers_side import LowerTiersSide
from kvoffload.runtime.observers import Observers
from kvoffload.runtime.open_copies import OpenCopies
from kvoffload.runtime.pin_ages import PinAges
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.remote_index import RemoteIndex
from kvoffload.runtime.resets import Resets
from kvoffload.runtime.step_times import FirstTokens, HasToken
from kvoffload.runtime.watchdog import Watchdog
from kvoffload.telemetry.catalogue import Hook, Series, read_all
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.journal import Journal
from kvoffload.telemetry.provenance import describe_run, info_labels
from kvoffload.telemetry.spans import make_spans

log = get_logger("scheduler")
_UNKNOWN = EngineIdentity()

# CPython 3.11 takes ten times as long to reach an enum's member through its class.
_SEEN, _LOOKUP, _ALLOCATED = Hook.SEEN, Hook.LOOKUP, Hook.ALLOCATED
_STEP, _ENDED, _REPORT, _RESET = Hook.STEP, Hook.ENDED, Hook.REPORT, Hook.RESET


class SchedulerSide:
    """Offloading for one engine, on its scheduler's thread.

    Args:
        shape: the engine's fixed facts.
        config: the operator's settings.
        device: the engine's block pool.
        portal: the thread for observers; None runs without any (the journal's ring and the counters are inline).
        clocks: where time comes from.
        identity: of the engine; journals and metrics carry it.
        disk: where the disk's files belong, None without a disk; needs a portal.
        remote: where blocks belong in a store that engines share, None without one; needs a portal.
        tier_key: authenticates what disk and store hold; None where their writers are trusted.

    Raises:
        ConfigError: the engine promises too little for the settings, the journal's file cannot be written, or what spans
            need is not installed.
    """

    def __init__(
        self,
        shape: EngineShape,
        config: OffloadConfig,
        device: BlockPool,
        *,
        portal: Portal | None = None,
        clocks: Clocks | None = None,
        identity: EngineIdentity = _UNKNOWN,
        disk: DiskPlace | None = None,
        remote: RemotePlace | None = None,
        tier_key: TierKey | None = None,
    ) -> None:
        self._clocks = clocks or Clocks()
        now = self._clocks.monotonic
        self._precise = self._clocks.precise
        self.shape = shape
        self._timeout_s = config.transfer_timeout_s
        self._spans = make_spans(config, shape, self._clocks.unix)
        self.sends_spans = self._spans is not None
        self.core = OffloadCore(
            shape,
            _policy(config, shape, has_disk=disk is not None, has_remote=remote is not None),
            device,
        )
        state = self.core.state
        self._tally = state.tally
        self._jobs = state.jobs
        self._live = state.requests.live
        self.provenance = describe_run(identity, shape, config, self._clocks.unix())
        self.info = info_labels(identity, config)
        self.journal = Journal(
            self._clocks.unix,
            path=config.journal_path,
            max_bytes=config.journal_max_bytes,
            provenance=self.provenance,
            on_failure=self._journal_failed,
        )
        self.bus = Bus(self._tally)
        self.counters = Counters()
        self.copies = OpenCopies(shape.ranks, self._clocks, self._timeout_s)
        self._spent: dict[Hook, float] = {}  # seconds in this step
        # When each request was first answered "not yet". After the time limit it is answered without waiting.
        self._deferred_since: dict[RequestId, float] = {}
        # Since when each request has been answered "not yet": the time that it waits for other requests' loads.
        self._waiting_since: dict[RequestId, float] = {}
        self._awaited = AwaitedLoads(self.copies.open)
        self._degradation = Degradation(self.journal, config.journal_path)
        self.pins = PinAges(self._clocks)
        self.resets = Resets(self._jobs, self.bus.publish)
        self.store_shares = dict.fromkeys(map(Rank, range(shape.ranks)), 1.0)  # as each rank last reported
        self.memory = HostMemory()
        self._broken = BrokenCore(
            self.core, self.bus, self.copies, self._degradation, (self.pins, self.resets)
        )
        self._ask = self._broken.ask
        self._below = _lower_tiers_side(
            disk, remote, tier_key, self.core, self._broken, config, portal, self._clocks
        )
        self._conservation = Conservation(self.core, device, self.counters, self.bus.publish, self._broken)
        set_least = self.core.set_least if config.min_load_tokens == AUTO else None
        self.benefit = NetBenefit(shape.alignment, shape.ranks, self.copies, now, set_least)
        self._first_tokens = FirstTokens(now)
        self._handle_facts()
        self._subscribe(portal)
        self._observers = Observers(self.bus, self.journal, self.counters, now, self._spans)
        if portal is not None:
            self._observers.start(portal, Watchdog(self.pins, self.copies, self._timeout_s, self._clocks))

    def _handle_facts(self) -> None:
        bus, core = self.bus, self.core
        bus.handle(facts.RequestSeen, core.request_seen)
        bus.handle(facts.BlocksAllocated, core.blocks_allocated)
        bus.handle(facts.StepScheduled, core.step_scheduled)
        bus.handle(facts.RequestEnded, core.request_ended)
        bus.handle(facts.TransferReported, core.transfer_reported)
        bus.handle(facts.JobOverdue, core.job_overdue)
        bus.handle(facts.CacheReset, core.cache_reset)
        bus.handle(facts.InvariantBroken, core.law_broken)
        if (tiers := core.lower_tiers) is not None:
            bus.handle(facts.DiskRestored, tiers.disk_restored)
            bus.handle(facts.DiskClosed, tiers.disk_closed)
            bus.handle(facts.RemoteOpened, tiers.remote_opened)
            bus.handle(facts.RemoteLost, tiers.remote_lost)
            bus.handle(facts.RemoteAnswered, tiers.remote_answered)
        bus.on_state_error(self._broken.handler_raised)

    def _subscribe(self, portal: Portal | None) -> None:
        for watcher in (self.counters, self.pins, self.benefit, self.resets, self.memory, self.journal):
            watcher.subscribe(self.bus)
        self._first_tokens.subscribe(self.bus)
        self._degradation.subscribe(self.bus, portal)

    # -- requests -----------------------------------------------------------------------------------------------

    def seen(
        self, fact: facts.RequestSeen, has_token: HasToken | None = None, trace_parent: str | None = None
    ) -> None:
        """The engine took a request in; `has_token` says whether its first token is there, `trace_parent` is W3C's."""
        began = self._precise()
        if has_token is not None:
            self._first_tokens.expect(fact.request, has_token)
        if self._spans is not None:
            self._spans.expect(trace_parent)
        self.bus.dispatch([fact])
        if self._below is not None and self._below.asks:
            self._below.ask()
        spent = self._spent
        spent[_SEEN] = spent.get(_SEEN, 0.0) + self._precise() - began

    def lookup(
        self,
        request: RequestId,
        device_tokens: int,
        tokens: int = 0,
        new_keys: Sequence[Sequence[BlockKey]] = (),
        full_tokens: int = 0,
    ) -> int | None:
        """Return the tokens that the host adds to `device_tokens`, or None for "not yet". Any number of times.

        Args:
            request: whose prefix.
            device_tokens: tokens that the device holds.
            tokens: what the request must hold before its next new token, where that is more than its prompt.
            new_keys: per group, keys of its whole blocks that were not given before.
            full_tokens: tokens whose blocks of full attention the device holds, where it lacks a recurrent state.
        """
        began = self._precise()
        answer: int | None = 0
        events: list[Event] = []
        if self._broken.error is None:
            try:
                answer = self.core.lookup(
                    request,
                    device_tokens,
                    may_wait=not self._deferred_since or self._has_patience(request),
                    full_tokens=full_tokens,
                    tokens=tokens,
                    new_keys=new_keys,
                )
                if self._tally.events or self._tally.has_sums:
                    events = self._tally.take()
            except Exception as error:
                self._broken.raised(error, "lookup")
        if answer is None:
            now = self._clocks.monotonic()
            self._deferred_since.setdefault(request, now)
            self._waiting_since.setdefault(request, now)
        elif self._waiting_since:
            self._stop_waiting(request)
        if events:
            self.bus.dispatch(events)
        spent = self._spent
        spent[_LOOKUP] = spent.get(_LOOKUP, 0.0) + self._precise() - began
        return answer

    def _has_patience(self, request: RequestId) -> bool:
        """Whether a request may be answered "not yet" again."""
        since = self._deferred_since.get(request)
        return since is None or self._clocks.monotonic() - since < self._timeout_s

    def junction(self, request: RequestId) -> int:
        """Return the tokens after which a looked-up request should hand its recurrent states off; 0 for nowhere."""
        record = self.core.state.requests.live.get(request) if self._broken.error is None else None
        return 0 if record is None else record.boundary

    def allocated(self, fact: facts.BlocksAllocated) -> None:
        """The engine gave a request a block table."""
        began = self._precise()
        if self._deferred_since:
            self._deferred_since.pop(fact.request, None)
            self._stop_waiting(fact.request)
        if fact.external_tokens:
            self._awaited.began(fact.request)
        self.bus.dispatch([fact])
        spent = self._spent
        spent[_ALLOCATED] = spent.get(_ALLOCATED, 0.0) + self._precise() - began

    def ended(self, fact: facts.RequestEnded) -> None:
        """A request finished or was aborted, and still has its blocks."""
        began = self._precise()
        if self._deferred_since:
            self._deferred_since.pop(fact.request, None)
            self._stop_waiting(fact.request)
        self.bus.dispatch([fact])
        if not self._live:
            if self._below is not None:
                self._below.rest()
            self.benefit.idle()
            if not self._jobs.pending:
                self._ask("audit", self._conservation.at_rest, None)
        spent = self._spent
        spent[_ENDED] = spent.get(_ENDED, 0.0) + self._precise() - began

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, fact: facts.StepScheduled) -> TransferPlan:
        """The engine scheduled a step: return what the workers must copy. Exactly once a step."""
        began = self._precise()
        if self._broken.pending_error is not None:
            self._broken.raised(*self._broken.pending_error)
        if self.copies.oldest is not None:
            for job in self.copies.overdue(self._clocks.monotonic()):
                self.bus.dispatch([facts.JobOverdue(job)])
        if self.resets.draining:
            self._ask("step", self.resets.look, None)
        batch: list[object] = [fact]
        if self._first_tokens.admitted:
            batch[:0] = self._first_tokens.look()
        below = self._below
        if below is not None and (
            below.is_opening
            or below.ended
            or below.due
            or below.polls_at <= began
            or below.overdue_at <= began
        ):
            batch += below.take_facts(began)
        self.bus.dispatch(batch)
        jobs = self._jobs
        plan = (
            self._plan(began) if (jobs.planned or jobs.cancelled) and self._broken.error is None else NOTHING
        )
        spent = self._spent
        if below is not None and below.records:
            below.record()
        spent[_STEP] = spent.get(_STEP, 0.0) + self._precise() - began
        self.counters.hooks(spent)
        spent.clear()
        return plan

    def _plan(self, began: float) -> TransferPlan:
        """Return the step's plan, and note its jobs as being with the workers."""
        try:
            plan = self.core.plan()
        except Exception as error:
            self._broken.raised(error, "plan")
            return NOTHING
        if plan.loads:
            self._awaited.submitted(plan.loads)
        self.copies.submitted((*plan.loads, *plan.stores), self._clocks.monotonic())
        if self._below is not None and (plan.disk or plan.remote):
            self._below.moved(began)
        if self._tally.events or self._tally.has_sums:
            try:
                events = self._tally.take()
            except Exception as error:
                self._broken.raised(error, "take_events")
            else:
                self.bus.dispatch(events)
        return plan

    # -- reports ------------------------------------------------------------------------------------------------

    def reported(self, reports: Sequence[TransferReport]) -> LoadAnswers:
        """Ranks reported what ended; return the loads that the engine must learn of."""
        began, open_before = self._precise(), self._jobs.open_on_tiers
        for report in reports:
            if report.jobs:
                self.copies.reported(report)
            if report.rank in self.store_shares:
                self.store_shares[report.rank] = report.store_share
            self.bus.dispatch([facts.TransferReported(report)])
            if report.lost is not None:
                self.bus.dispatch([facts.InvariantBroken(DegradeCause.TRANSFER_DEAD, report.lost)])
        if reports:
            below, has_moved = self._below, self._jobs.open_on_tiers != open_before
            if below is not None and (has_moved or below.records or below.awaits_files):
                below.reported(reports, began, has_moved=has_moved)
            self._look_after_reports()
        answers = self.take_answers()
        spent = self._spent
        spent[_REPORT] = spent.get(_REPORT, 0.0) + self._precise() - began
        return answers

    def take_answers(self) -> LoadAnswers:
        """Return the loads that ended since the last call; some end without a report."""
        ended = self.core.state.results
        if not (ended.loaded or ended.failed or self._degradation.cause):
            return NO_ANSWERS
        results = self._ask("take_results", self.core.take_results, LoadResults())
        if self._degradation.cause is not None:
            results.failed += self._awaited  # what a broken core planned is not to be trusted
        return self._awaited.answer(results)

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping for something to end."""
        if self._awaited:
            return True
        if self._broken.error is not None:
            return self.copies.oldest is not None
        if self._below is None or self._live:
            return self._ask("has_work", lambda: self.core.has_work, False)
        return self._ask("has_work", lambda: self.core.has_host_work, False) or self._below.has_work

    @property
    def watches_blocks(self) -> bool:
        """Whether a step must report all blocks that were handed out, also of requests whose progress is reported later."""
        tables = self.core.state.tables
        return bool(tables.places or tables.shared or self.core.state.generation)

    @property
    def degraded(self) -> DegradeCause | None:
        """Why offloading is off, None while it is on."""
        return self._degradation.cause

    @property
    def disk_identity(self) -> KVIdentity | None:
        """What the KV in the disk's folder depends on; None before this process has locked the folder."""
        return None if self._below is None else self._below.disk_identity

    # -- what operators ask -------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Find nothing computed so far ever again, at once; return whether all of it is done.

        It is not while a copy from before runs: the metric `kvoffload_reset_draining_jobs` counts those, and when the last of
        them has ended, `reset_ended` is logged. Nor is it while a later process could find what the disk or the store has
        from before; the log says so. Calling it again is harmless, and tries again.
        """
        began = self._precise()
        self.bus.dispatch([facts.CacheReset()])
        is_forgotten = self._below is None or self._below.reset()
        self._spent[_RESET] = self._spent.get(_RESET, 0.0) + self._precise() - began
        has_ended = self.copies.oldest is None if self._broken.error is not None else not self._jobs.pending
        return has_ended and is_forgotten

    def audit(self) -> list[str]:
        """Return every violated conservation law; a violation switches offloading off (R12).

        On the engine's thread, between two hooks. Costs time in the size of the pool; at rest a cheaper one is made
        each time without being asked for.
        """
        return self._conservation.in_full()

    def gauges(self) -> Mapping[str, Series]:
        """Return the series of each metric that is read, by name; if a reader raises, `kvoffload_degraded` alone.

        Any thread may ask.
        """
        try:
            return read_all(self)
        except Exception as error:
            self._broken.raised_on_another_thread(error, "gauges")
            return {"kvoffload_degraded": {(DegradeCause.HANDLER_RAISED.value,): 1}}

    def close(self) -> None:
        """Stop the observers. Open jobs are the workers' to drain."""
        self.bus.close()
        self._observers.wait()
        if self._below is not None:
            self._below.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _look_after_reports(self) -> None:
        """Look at what the ends of copies may have changed."""
        if self._broken.is_off:
            self._broken.release_loose()
        if self.resets.draining:
            self._ask("report", self.resets.look, None)
        if not (self._jobs.pending or self._live):
            self._ask("audit", self._conservation.at_rest, None)

    def _stop_waiting(self, request: RequestId) -> None:
        """A request no longer waits for another request's load, or for a fetch."""
        since = self._waiting_since.pop(request, None)
        if since is not None:
            self.benefit.waited(request, self._clocks.monotonic() - since)

    def _journal_failed(self, error: Exception) -> None:
        self.counters.journal_failed()
        log.error("journal_stopped", error=str(error), note="the engine and the ring in memory continue")


def _lower_tiers_side(
    disk: DiskPlace | None,
    remote: RemotePlace | None,
    key: TierKey | None,
    core: OffloadCore,
    broken: BrokenCore,
    config: OffloadConfig,
    portal: Portal | None,
    clocks: Clocks,
) -> LowerTiersSide | None:
    """Begin to open the tiers below the host; return None without any."""
    if core.lower_tiers is None:
        return None
    assert portal is not None, "a tier below the host needs a portal"
    ranks, timeout_s = core.state.shape.ranks, config.remote_timeout_s
    index, store = None, None
    if disk is not None:
        index = DiskIndex(disk, ranks, portal, clocks.sleep, closes_in_s=config.drain_s, key=key)
    if remote is not None:
        store = RemoteIndex(remote, ranks, portal, clocks.monotonic, timeout_s, key)
    return LowerTiersSide(
        core.lower_tiers, core.state, broken, index, store, clocks.monotonic,
        timeout_s=config.transfer_timeout_s, drain_s=config.drain_s,
    )  # fmt: skip


def _policy(
    config: OffloadConfig,
    shape: EngineShape,
    *,
    has_disk: bool = False,
    has_remote: bool = False,
) -> Policy:
    """Return what the operator chose, as the core wants it.

    Raises:
        ConfigError: the engine promises too little for it.
    """
    check_promises(config, shape.promises)
    if config.disk_path is not None and not has_disk:
        raise ConfigError(
            ["disk_path is set, but this engine's adapter has no disk below the host; leave it out"]
        )
    if config.remote_url is not None and not has_remote:
        raise ConfigError(
            ["remote_url is set, but this engine's adapter has no remote store below the host; leave it out"]
        )
    least = config.min_load_tokens if isinstance(config.min_load_tokens, int) else shape.alignment
    return Policy(
        config.store_policy,
        least,
        config.prefix_junctions,
        config.spill_after_hits if has_disk else None,
        config.share_after_hits if has_remote else None,
    )
