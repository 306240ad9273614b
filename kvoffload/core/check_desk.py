"""The check desk: has what a lookup found read before it is promised, on an engine that cannot recover a load."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.jobs import Job
from kvoffload.core.requests import RequestRecord
from kvoffload.core.state import CoreState
from kvoffload.core.states import JobEvent
from kvoffload.model.events import CheckScheduled
from kvoffload.model.ids import SlotId
from kvoffload.model.transfer import Direction


class CheckDesk:
    """Plans checks and ends them. A check is a job that reads slots and touches no device block."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._planned: list[Job] = []

    def begin(self, record: RequestRecord, slots: Sequence[SlotId]) -> None:
        """Have slots that can hit read, those apart that are being read for another request."""
        state = self._state
        slots = state.checked.not_being_read(slots)
        if not slots:
            return
        job = state.jobs.plan(Direction.CHECK, state.leases.open())
        job.slots = list(slots)
        job.request = (record.request, record.incarnation)
        job.pins = state.pool.pin(slots)
        state.checked.begun(slots)
        self._planned.append(job)
        state.outbox.put(CheckScheduled(job.job, record.request, len(slots)))

    @property
    def planned(self) -> Sequence[Job]:
        """The step's checks. Reads only."""
        return self._planned

    def submit(self) -> None:
        """Hand the step's checks over."""
        planned, self._planned = self._planned, []
        self._state.jobs.submit(planned)

    def cancel_planned(self) -> None:
        """Take back the checks that no worker knows of yet."""
        for job in self._planned:
            self._over(job, ())
            job.lease.close()
            self._state.jobs.move(job, JobEvent.CANCEL)
        self._planned.clear()

    def abandoned(self, job: Job) -> None:
        """A check did not end in time, and the caller has written its slots off."""
        self._over(job, ())

    def ended(self, job: Job) -> None:
        """No rank reads the slots any more. Those that some rank found bad no lookup finds, so all may count as good."""
        if not job.settled:
            self._over(job, job.slots)
        job.lease.close()

    def _over(self, job: Job, good: Sequence[SlotId]) -> None:
        assert job.pins is not None, job
        self._state.checked.ended(job.slots, good)
        job.settled = True
        job.pins.close()
