"""The state at one moment, for whoever scrapes. Reads single numbers only, so any thread may ask."""

from __future__ import annotations

from kvoffload.bus.bus import Bus
from kvoffload.core.state import CoreState
from kvoffload.core.states import JobState, SlotState
from kvoffload.model.causes import DegradeCause
from kvoffload.model.transfer import Direction
from kvoffload.runtime.open_copies import OpenCopies
from kvoffload.runtime.pin_ages import PinAges
from kvoffload.runtime.resets import Resets
from kvoffload.runtime.store_shares import StoreShares
from kvoffload.runtime.watchdog import Since
from kvoffload.telemetry.gauges import GaugeSnapshot
from kvoffload.telemetry.labels import JobLabel, SlotLabel
from kvoffload.telemetry.net_benefit import NetBenefit
from kvoffload.telemetry.step_times import Copies


def read_gauges(
    state: CoreState,
    bus: Bus,
    pins: PinAges,
    copies: OpenCopies,
    resets: Resets,
    shares: StoreShares,
    benefit: NetBenefit,
    degraded: DegradeCause | None,
) -> GaugeSnapshot:
    """Return the state now."""
    slots = {SlotLabel[each.name].value: state.pool.count(each) for each in SlotState}
    jobs = {}
    for direction in Direction:
        jobs[direction.value, JobLabel.PLANNED.value] = state.jobs.count(direction, JobState.PLANNED)
        jobs[direction.value, JobLabel.SUBMITTED.value] = copies.count(direction, is_overdue=False)
        jobs[direction.value, JobLabel.ABANDONED.value] = copies.count(direction, is_overdue=True)
    return GaugeSnapshot(
        slots=slots,
        capacity_slots=sum(slots.values()),
        open_jobs=jobs,
        oldest_pin_s=_unix(pins.oldest),
        oldest_job_s=_unix(copies.oldest),
        abandoned_blocks=state.stall.blocks,
        copies_stalled=state.stall.is_on,
        reset_draining_jobs=resets.draining,
        store_share=shares.least,
        degraded=degraded,
        dropped={name: feed.dropped for name, feed in bus.statistics().feeds},
        benefit=benefit.series(),
    )


def copies_under_way(copies: OpenCopies) -> int:
    """Return which copies a worker may be making, as one of `Copies`. Asked in every step."""
    if not copies.are_pending:
        return Copies.NONE
    stores = Copies.STORES if copies.count(Direction.STORE, is_overdue=False) else 0
    return stores | (Copies.LOADS if copies.count(Direction.LOAD, is_overdue=False) else 0)


def _unix(since: Since | None) -> float:
    return since.unix if since is not None else 0.0
