"""How jobs end: what ranks report, what takes too long, and what is given back when."""

from __future__ import annotations

from kvoffload.core.check_desk import CheckDesk
from kvoffload.core.jobs import Job
from kvoffload.core.load_desk import LoadDesk
from kvoffload.core.planners import StorePlanner
from kvoffload.core.state import CoreState
from kvoffload.core.states import JobEvent, JobState
from kvoffload.core.store_desk import StoreDesk
from kvoffload.model.causes import CopyOutcome, LoadOutcome, StoreOutcome, SurpriseCause
from kvoffload.model.events import (
    CapacityGrown,
    CopiesResumed,
    CopiesStalled,
    EngineSurprised,
    JobAbandoned,
    RankReported,
)
from kvoffload.model.facts import JobOverdue, RankLost, TransferReported
from kvoffload.model.ids import Rank
from kvoffload.model.transfer import Direction, JobReport, TransferReport


class Transfers:
    """Moves jobs through their machine. Reports are sets of ranks: hearing one twice changes nothing."""

    def __init__(
        self, state: CoreState, stores: StoreDesk, loads: LoadDesk, checks: CheckDesk, planner: StorePlanner
    ) -> None:
        self._state = state
        self._stores = stores
        self._loads = loads
        self._checks = checks
        self._planner = planner

    def on_reported(self, fact: TransferReported) -> None:
        """A rank told which of its copies ended, and how many slots it has ready."""
        report = fact.report
        self._ready(report)
        for part in report.jobs:
            job = self._state.jobs.get(part.job)
            if job is not None and self._state.jobs.heard(job, report.rank, part.outcome, part.corrupt):
                self._heard(job, report.rank, part)

    def on_overdue(self, fact: JobOverdue) -> None:
        """A job takes too long: give it up, and write its memory off until its copies end (R16)."""
        job = self._state.jobs.get(fact.job)
        if job is None or job.state is not JobState.SUBMITTED:
            return
        self._state.jobs.move(job, JobEvent.ABANDON)
        self._state.stall.abandoned(job)
        self._look_at_stall()
        self._state.outbox.put(JobAbandoned(job.job, job.direction, len(job.slots)))
        for record in job.concerns:
            self._state.holds.stuck(record)
        if job.direction is Direction.STORE:
            if not job.settled:
                self._stores.failed(job, StoreOutcome.ABANDONED)
            for slot in job.slots:
                self._state.pool.quarantine(slot)
        else:
            self._loads.written_off(job)
            if job.direction is Direction.CHECK:
                self._checks.abandoned(job)
            else:
                self._loads.failed(job, LoadOutcome.ABANDONED)

    def _look_at_stall(self) -> None:
        stall = self._state.stall
        if stall.has_turned():
            self._state.outbox.put(
                CopiesStalled(stall.blocks, stall.limit, stall.jobs_in_a_row)
                if stall.is_on
                else CopiesResumed(stall.blocks)
            )

    def _over(self, job: Job) -> None:
        """The job's last copy has ended."""
        was_abandoned = job.state is JobState.ABANDONED
        self._state.jobs.move(job, JobEvent.FAIL if job.failed else JobEvent.FINISH)
        self._state.stall.ended(job, was_abandoned=was_abandoned)
        self._look_at_stall()

    def on_rank_lost(self, fact: RankLost) -> None:
        """A rank will never report again: what it had open is overdue now."""
        for job in self._state.jobs.all():
            if fact.rank in job.waiting:
                self.on_overdue(JobOverdue(job.job))

    def _ready(self, report: TransferReport) -> None:
        """Capacity is the minimum of what the ranks have ready, and final when no rank expects more."""
        state, rank, slots = self._state, report.rank, report.ready_slots
        if not 0 <= rank < len(state.ready):
            state.outbox.put(EngineSurprised(SurpriseCause.UNKNOWN_JOB))
            return
        state.ready[rank] = max(state.ready[rank], slots)
        if not report.is_growing:
            state.growing.discard(rank)
        if state.pool.grow(min(state.ready)):
            state.outbox.put(CapacityGrown(state.pool.capacity))

    def _heard(self, job: Job, rank: Rank, part: JobReport) -> None:
        event = RankReported(
            job.job, rank, job.direction, part.outcome, part.copied_bytes, part.queue_s, part.copy_s
        )
        self._state.outbox.put(event)
        if job.direction is Direction.STORE:
            self._store_heard(job, part.outcome)
        else:
            self._reading_heard(job, part)

    def _store_heard(self, job: Job, outcome: CopyOutcome) -> None:
        """One failed rank dooms a store at once; its memory is free when every rank's copy has ended (R4)."""
        if outcome is not CopyOutcome.DONE and not job.settled:
            self._stores.failed(job, StoreOutcome.FAILED)
        if not job.copies_ended:
            return
        if not job.settled:
            self._stores.arrived(job)
        self._stores.copies_ended(job)
        self._over(job)

    def _reading_heard(self, job: Job, part: JobReport) -> None:
        """What one rank finds bad no rank may use. The outcome is known when every rank has ended, or was before (R9)."""
        if part.outcome is not CopyOutcome.DONE:
            self._loads.doubted(job, part)
        if not job.copies_ended:
            return
        if job.direction is Direction.CHECK:
            self._checks.ended(job)
        else:
            if not job.settled:
                self._load_ended(job)
            self._loads.copies_ended(job)
        self._over(job)

    def _load_ended(self, job: Job) -> None:
        if job.failed is not None or self._state.degraded is not None:
            # With a law broken, what was loaded is not to be trusted either.
            corrupt = job.failed is CopyOutcome.CORRUPT
            self._loads.failed(job, LoadOutcome.CORRUPT if corrupt else LoadOutcome.FAILED)
            return
        self._loads.loaded(job)
        record = self._state.requests.incarnation(*job.request) if job.request is not None else None
        if record is not None:
            self._planner.loaded(record)
