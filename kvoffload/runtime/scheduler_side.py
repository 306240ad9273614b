"""The scheduler's side of offloading, which an adapter's hooks call.

Each hook passes its fact to a method of the core, through the guard in `Faults`. Then the fact and the core's events
reach counters, the journal and all other observers in one batch, whose guard is the bus. Lookups and the planning of a
step return a result, so they call the core themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvoffload.bus.bus import Bus
from kvoffload.bus.current_hook import CurrentHook, HasToken
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import CoreState, LoadResults, Policy
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.tier_key import TierKey
from kvoffload.model import facts
from kvoffload.model.causes import DegradeCause
from kvoffload.model.config import AUTO, OffloadConfig, check_promises
from kvoffload.model.engine import BlockPool, EngineIdentity, EngineShape
from kvoffload.model.events import HostMemoryOpened, LoadOrphaned, RequestsEnded, WaitEnded
from kvoffload.model.ids import BlockKey, Rank, RequestId
from kvoffload.model.wire import NOTHING, Tier, TransferPlan, TransferReport
from kvoffload.runtime.benefit import NetBenefit
from kvoffload.runtime.copies import NO_ANSWERS, LoadAnswers, OpenCopies
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.faults import Faults
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.runtime.node_catalog import NodeCatalog
from kvoffload.runtime.observation import Observation
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.tier_kinds import Catalog, Places, Scheduler, catalogs_of, states_of
from kvoffload.runtime.tiers_side import TiersSide
from kvoffload.telemetry.catalogue import CATALOGUE, Hook, Labels, Metric, Series, read_all
from kvoffload.telemetry.counters import Counters
from kvoffload.transfer.ports import Clocks

_UNKNOWN = EngineIdentity()
_TICK_STEPS, _TICK_AT = 16, 8  # not in the steps in which vLLM's decoding requests are reported

# In CPython 3.11, reading a module global takes a tenth of the time of reading `Hook.SEEN`.
_SEEN, _LOOKUP, _ALLOCATED = Hook.SEEN, Hook.LOOKUP, Hook.ALLOCATED
_STEP, _ENDED, _REPORT, _RESET = Hook.STEP, Hook.ENDED, Hook.REPORT, Hook.RESET


class SchedulerSide:
    """Runs offloading for one engine. Only the scheduler's thread may call a method, unless the method allows others.

    Args:
        shape: the engine's fixed properties.
        config: the operator's settings.
        device: the engine's block pool.
        portal: runs the observers. Without a portal, only the counters and the journal's ring in memory observe.
        clocks: the clocks to read.
        identity: the engine's identity, for journals and metrics.
        places: where this engine's blocks are on each lower tier; lower tiers need a portal.
        tier_key: authenticates the contents of lower tiers; None if all writers of these tiers are trusted.

    Raises:
        ConfigError: the engine promises too little for the settings, the journal's file cannot be written, or a
            package that spans need is not installed.
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
        places: Places | None = None,
        tier_key: TierKey | None = None,
    ) -> None:
        self._clocks = clocks or Clocks()
        self._hook = CurrentHook(self._clocks.monotonic, self._clocks.unix)
        self.bus = Bus(self._hook)
        # Both dicts contain requests that are not admitted. `_deferred` has the time of a request's first "not yet",
        # at which its time limit begins. `_waiting` has the time of the first "not yet" after the last other answer.
        self._deferred: dict[RequestId, float] = {}
        self._waiting: dict[RequestId, float] = {}
        self.shape = shape
        places = places or {}
        self.core = OffloadCore(shape, _policy(config, shape, places), device)
        self._jobs = self.core.state.jobs
        tiers = {tier.tier for tier in self.core.state.tiers}
        self.observation = Observation(self.bus, shape, config, identity, self._clocks, tiers)
        self.copies = OpenCopies(shape.ranks, config.transfer_timeout_s, self._jobs)
        set_least = self.core.set_least if config.min_load_tokens == AUTO else None
        live = self.core.state.requests.live
        self.benefit = NetBenefit(
            shape.alignment, self.copies, self.bus, self.counters.waits, live, set_least
        )
        self.reports = {rank: TransferReport(rank, (), 0) for rank in map(Rank, range(shape.ranks))}
        """Each rank's last report. Any thread may read it."""
        self.faults = Faults(self.core, self.bus, self.copies, device)
        self._reported = self.core.state.reported
        self._unopened: HostCatalog | None = None  # of a host in files, until its opening is published
        self._tiers = TiersSide(
            self.core.state,
            self.core.tier_store,
            self._catalogs(places, config, portal, tier_key),
            self.faults,
            self._clocks.monotonic,
            timeout_s=config.transfer_timeout_s,
            drain_s=config.disk_drain_s,
        )
        if portal is not None:
            self.observation.start(portal, self)

    @property
    def counters(self) -> Counters:
        return self.observation.counters

    @property
    def info(self) -> Labels:
        return self.observation.info

    @property
    def state(self) -> CoreState:
        return self.core.state

    @property
    def catalogs(self) -> Mapping[Tier, Catalog]:
        """Return the scheduler's part of each lower tier."""
        return self._tiers.catalogs

    def unix(self, since: float | None) -> float:
        """Convert a monotonic time to seconds since 1970, rounded so that repeated calls agree; 0 for None."""
        return 0 if since is None else round(self._hook.unix(since), 1)

    # -- requests -----------------------------------------------------------------------------------------------

    def seen(self, fact: facts.RequestSeen, has_token: HasToken | None = None) -> None:
        """Handle a new request.

        Args:
            fact: the request.
            has_token: returns a true value once the request has its first token. None if that is not measured.
        """
        began = self._hook.now = self._clocks.monotonic()
        self._hook.has_token = has_token
        batch: list[object] = [fact]
        self.faults.apply(self.core.request_seen, fact, batch, began)
        self.bus.dispatch(batch)
        for outbox in self._tiers.outboxes:
            if outbox:
                self._tiers.send()
        self._hook.spent[_SEEN] += self._clocks.monotonic() - began

    def lookup(
        self,
        request: RequestId,
        device_tokens: int,
        tokens: int = 0,
        new_keys: Sequence[Sequence[BlockKey]] = (),
        full_tokens: int = 0,
    ) -> int | None:
        """Return how many tokens the host adds to `device_tokens`; None if the engine must look up again later.

        Args:
            request: the request.
            device_tokens: tokens that the device holds.
            tokens: for a preempted request, how many prompt and generated tokens it has.
            new_keys: per group, the keys of the request's whole blocks that were not passed before.
            full_tokens: tokens whose full-attention blocks the device holds, if the device lacks a recurrent state.
        """
        began = self._hook.now = self._clocks.monotonic()
        answer: int | None = 0
        batch: list[object] = []
        tally = self.core.state.tally
        if self.faults.error is None:
            try:
                answer = self.core.lookup(
                    request,
                    device_tokens,
                    may_wait=not self._deferred
                    or began < self._deferred.get(request, began) + self.copies.timeout_s,
                    full_tokens=full_tokens,
                    tokens=tokens,
                    new_keys=new_keys,
                )
                if tally.events or tally.has_sums:
                    batch += tally.take()
            except Exception as error:
                batch = self.faults.raised(error, "lookup")
        if answer is None:
            self._deferred.setdefault(request, began)
            self._waiting.setdefault(request, began)
        elif request in self._waiting:
            batch.append(self._wait_ended(request))
        if batch:
            self.bus.dispatch(batch)
        self._hook.spent[_LOOKUP] += self._clocks.monotonic() - began
        return answer

    def _wait_ended(self, request: RequestId) -> WaitEnded:
        """Remove a request from those that wait for another request's load or for a fetch."""
        return WaitEnded(request, self._hook.now - self._waiting.pop(request))

    def _end_deferral(self, request: RequestId) -> list[object]:
        self._deferred.pop(request, None)
        return [self._wait_ended(request)] if request in self._waiting else []

    def prefix_boundary(self, request: RequestId) -> int:
        """Return after how many tokens the engine should end a chunk, to keep the recurrent state there; 0 for none."""
        return self.faults.ask("boundary", lambda: self.core.boundary(request), 0)

    def allocated(self, fact: facts.BlocksAllocated) -> None:
        began = self._hook.now = self._clocks.monotonic()
        batch: list[object] = [fact]
        if self._deferred:
            batch += self._end_deferral(fact.request)
        if fact.external_tokens:
            self.copies.awaits(fact.request)
        self.faults.apply(self.core.blocks_allocated, fact, batch)
        self.bus.dispatch(batch)
        self._hook.spent[_ALLOCATED] += self._clocks.monotonic() - began

    def fetched_tokens(self, request: RequestId, tokens: int) -> Mapping[Tier, int]:
        """Return how many of the `tokens` that the engine last accepted were fetched for the request, by tier."""
        return self.faults.ask("fetched_tokens", lambda: self.core.fetched_tokens(request, tokens), {})

    def ended(self, fact: facts.RequestEnded) -> None:
        """Handle a request's end, before the engine frees the request's blocks."""
        began = self._hook.now = self._clocks.monotonic()
        batch: list[object] = [fact]
        if self._deferred:
            batch += self._end_deferral(fact.request)
        if fact.request in self.copies.awaited:
            batch.append(LoadOrphaned(fact.request))
        self.faults.apply(self.core.request_ended, fact, batch)
        is_idle = not self.core.state.requests.live
        if is_idle:
            batch.append(RequestsEnded())
        self.bus.dispatch(batch)
        if is_idle:
            if self._tiers.catalogs:
                self._tiers.rest(began)
            if not self._jobs.pending and self.faults.cause is None:
                self.faults.audit()
        self._hook.spent[_ENDED] += self._clocks.monotonic() - began

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, fact: facts.StepScheduled) -> TransferPlan:
        """Return the copies that the workers must start in a scheduled step. Call this method once per step."""
        began = self._hook.now = self._clocks.monotonic()
        copies, faults, tiers = self.copies, self.faults, self._tiers
        if copies.oldest is not None and copies.oldest + copies.timeout_s <= began:
            self._time_out(began)
        if copies.draining:
            self._look_at_reset()
        batch: list[object] = [fact]
        faults.apply(self.core.step_scheduled, fact, batch, began)
        for arrived in tiers.arrived:
            if arrived or tiers.due_at <= began:
                self._take_facts(batch)
                break
        self.bus.dispatch(batch)
        hook = self._hook
        hook.steps.append(hook.spent)
        hook.spent = defaultdict(float)
        if fact.step % _TICK_STEPS == _TICK_AT:
            self.bus.tick()
        jobs = self._jobs
        # The core plans only after it has handled all facts, and only if none of them made it raise.
        plan = self._plan(began) if (jobs.planned or jobs.cancelled) and faults.error is None else NOTHING
        for outbox in tiers.outboxes:
            if outbox:
                tiers.send()
        hook.spent[_STEP] += self._clocks.monotonic() - began
        return plan

    def _time_out(self, began: float) -> None:
        for job in self.copies.overdue(began):
            self._handle(facts.JobOverdue(job))

    def _take_facts(self, batch: list[object]) -> None:
        """Pass what happened on the lower tiers to the core, and add it to the batch for observers."""
        found, host = self._tiers.take_facts(self._hook.now), self._unopened
        if host is not None and host.opening is None:
            self._unopened = None
            batch.append(HostMemoryOpened(host.adoption, host.adopted))
        for fact in found:
            batch.append(fact)
            self.faults.apply(self.core.handle, fact, batch)

    def _plan(self, began: float) -> TransferPlan:
        """Return the step's plan, and record that its jobs are sent to the workers."""
        batch: list[object] = []
        tally = self.core.state.tally
        try:
            plan = self.core.plan()
            if tally.events or tally.has_sums:
                batch += tally.take()
        except Exception as error:
            self.bus.dispatch(self.faults.raised(error, "plan"))
            return NOTHING
        self.copies.submitted((*plan.loads, *plan.stores), began)
        if plan.below:
            self._tiers.moved(began)
        if batch:
            self.bus.dispatch(batch)
        return plan

    def _handle(self, fact: facts.Fact) -> None:
        batch: list[object] = [fact]
        self.faults.apply(self.core.handle, fact, batch)
        self.bus.dispatch(batch)

    # -- reports ------------------------------------------------------------------------------------------------

    def reported(self, reports: Sequence[TransferReport]) -> None:
        began = self._hook.now = self._clocks.monotonic()
        open_before = self._jobs.open_on_tiers
        for report in reports:
            if report.jobs:
                self.copies.reported(report)
            if report.rank in self.reports:
                self.reports[report.rank] = report
            batch: list[object] = [facts.TransferReported(report)]
            self.faults.apply(self._reported, report, batch)
            self.bus.dispatch(batch)
            if report.lost is not None:
                self.faults.broken(DegradeCause.TRANSFER_DEAD, report.lost)
        if reports:
            self._look_after_reports(reports, has_moved=self._jobs.open_on_tiers != open_before)
        results = self.core.state.results
        if results.loaded or results.failed or self.faults.cause is not None:
            self._answer()
        self._hook.spent[_REPORT] += self._clocks.monotonic() - began

    def _look_after_reports(self, reports: Sequence[TransferReport], *, has_moved: bool) -> None:
        """Do the work that ended copies allow; `has_moved` is True if a job on a lower tier has ended."""
        tiers = self._tiers
        is_due = has_moved or tiers.awaits_ranks
        for outbox in tiers.outboxes:
            is_due = is_due or outbox != []
        if is_due:
            tiers.reported(reports, self._hook.now, has_moved=has_moved)
        if self.faults.error is not None:
            self.faults.release_loose()
        if self.copies.draining:
            self._look_at_reset()
        if not (self._jobs.pending or self.core.state.requests.live or self.faults.cause):
            self.faults.audit()

    def take_answers(self) -> LoadAnswers:
        """Return the loads that ended since the last call and must be reported to the engine."""
        results = self.core.state.results
        if results.loaded or results.failed or self.faults.cause is not None:
            self._answer()
        return self.copies.take_answers() if self.copies.answers is not NO_ANSWERS else NO_ANSWERS

    def _answer(self) -> None:
        """Move the core's load results to the answers for the engine."""
        results = self.faults.ask("take_results", self.core.take_results, LoadResults())
        if self.faults.cause is not None:
            # After a broken invariant, the bytes of any load may be wrong.
            results.failed += self.copies.awaited
        self.copies.answer(results)

    @property
    def has_work(self) -> bool:
        """Return whether open copies, or tiers that are opening, need more steps of the engine."""
        if self.copies.awaited or self.copies.answers is not NO_ANSWERS:
            return True
        if self.faults.error is not None:
            return self.copies.oldest is not None
        if self.core.state.requests.live or not self._tiers.catalogs:
            return self.faults.ask("has_work", lambda: self.core.has_work, False)
        return self.faults.ask("has_work", lambda: self.core.has_host_work, False) or self._tiers.has_work

    @property
    def watches_blocks(self) -> bool:
        """Return whether steps must report all newly allocated blocks, even of requests that report progress later."""
        return self.faults.error is None and self.core.watches_blocks

    @property
    def degraded(self) -> DegradeCause | None:
        """Return why offloading is off; None while it is on."""
        return self.faults.cause

    @property
    def disk_identity(self) -> KVIdentity | None:
        """Return the identity of the KV in the disk's folder; None before this process has locked the folder."""
        disk = self.catalogs.get(Tier.DISK)
        return disk.identity if isinstance(disk, DiskCatalog) else None

    # -- calls from observers -----------------------------------------------------------------------------------

    def choose_policy(self, policy: str, found: Mapping[str, float]) -> None:
        """Store by another policy from now on, if it is allowed. Call this method between two batches.

        Args:
            policy: the policy.
            found: for each policy, the share of the recent prompts' blocks that it would have found.
        """
        if policy in self.core.policies:
            self._handle(facts.StorePolicyChosen(policy, dict(found)))

    # -- calls from operators -----------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Discard all blocks; return whether nothing computed before can be found or loaded any more.

        Other copies of older blocks may still run, but their results are dropped: `kvoffload_reset_draining_jobs` counts
        their jobs, and `reset_ended` is logged when the last has ended. The answer is False while a load of older
        blocks runs, and, with a warning in the log, while a later process could find older blocks on the disk or in the
        remote tier. Call `reset` again to retry.
        """
        began = self._hook.now = self._clocks.monotonic()
        self._handle(facts.CacheReset())
        self._look_at_reset(is_new=True)
        is_forgotten = self._tiers.reset()
        self._hook.spent[_RESET] += self._clocks.monotonic() - began
        return is_forgotten and not self.copies.is_loading

    def audit(self) -> list[str]:
        """Return a line for each problem found; any problem switches offloading off (R12).

        Call this method between two hooks. An audit also runs whenever the engine becomes idle. While requests run, an
        audit checks only a few totals.
        """
        return self.faults.audit()

    def gauges(self, metrics: Iterable[Metric] = CATALOGUE, /) -> Mapping[str, Series]:
        """Return the series of each metric that has a reader, by name, without metrics whose reader raises.

        Any thread may call this method.
        """
        return read_all(self, self.counters.tiers, self.observation.reader_failed, metrics)

    def close(self) -> None:
        """Stop the observers and close the lower tiers. Open jobs end when the workers close."""
        self.observation.finish()
        self.bus.close()
        self.observation.wait()
        self._tiers.close()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _catalogs(
        self, places: Places, config: OffloadConfig, portal: Portal | None, key: TierKey | None
    ) -> dict[Tier, Catalog]:
        if not places:
            return {}
        assert portal is not None, "a tier below the host, or host memory in files, needs a portal"
        ranks, clocks, found = self.shape.ranks, self._clocks, dict[Tier, Catalog]()
        host = None
        if Tier.HOST in places:
            used_at = self.core.state.pool.order.used_at
            found[Tier.HOST] = host = HostCatalog(
                places[Tier.HOST],
                ranks,
                portal,
                clocks.monotonic,
                clocks.sleep,
                used_at,
                keeps=config.host_keep,
                orphan_bytes=config.orphan_bytes,
            )
            self.faults.in_doubt = host.distrust
            self._unopened = host
        sharers = self.shape.sharers
        found |= catalogs_of(places, Scheduler(config, ranks, portal, clocks, key, sharers, host))
        if isinstance(node := found.get(Tier.NODE), NodeCatalog) and self.core.state.node is not None:
            self.core.state.node.neighbours = node
        return found

    def _look_at_reset(self, *, is_new: bool = False) -> None:
        """Publish the end of the last reset, if all jobs that were open at the reset have ended or were abandoned."""
        look = self.copies.reset if is_new else self.copies.look_at_reset
        epoch = self.core.state.epoch
        if event := self.faults.ask("reset", lambda: look(epoch), None):
            self.bus.publish(event)


def _policy(config: OffloadConfig, shape: EngineShape, places: Places) -> Policy:
    """Return the part of the settings that affects the core.

    Raises:
        ConfigError: the engine promises too little for the settings.
    """
    check_promises(config, shape.promises)
    return Policy(
        config.store_policy,
        config.min_load_tokens if isinstance(config.min_load_tokens, int) else shape.alignment,
        config.recurrent_prefix_boundaries,
        states_of(config, places),
        keeps_host=Tier.HOST in places,
    )
