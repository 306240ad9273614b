"""The state at one moment, for whoever scrapes. Reads single numbers only, so any thread may ask."""

from __future__ import annotations

from kvoffload.bus.bus import Bus
from kvoffload.core.state import CoreState
from kvoffload.core.states import JobState, SlotState
from kvoffload.model.transfer import Direction
from kvoffload.runtime.pin_ages import PinAges
from kvoffload.telemetry.gauges import GaugeSnapshot
from kvoffload.telemetry.labels import JobLabel, SlotLabel
from kvoffload.telemetry.net_benefit import NetBenefit

_OPEN = {
    JobState.PLANNED: JobLabel.PLANNED,
    JobState.SUBMITTED: JobLabel.SUBMITTED,
    JobState.ABANDONED: JobLabel.ABANDONED,
}


def read_gauges(state: CoreState, bus: Bus, pins: PinAges, benefit: NetBenefit) -> GaugeSnapshot:
    """Return the state now."""
    slots = {SlotLabel[each.name].value: state.pool.count(each) for each in SlotState}
    jobs = {
        (direction.value, label.value): state.jobs.count(direction, each)
        for direction in Direction
        for each, label in _OPEN.items()
    }
    return GaugeSnapshot(
        slots=slots,
        capacity_slots=sum(slots.values()),
        open_jobs=jobs,
        oldest_pin_s=pins.oldest_s,
        degraded=state.degraded,
        dropped={name: feed.dropped for name, feed in bus.statistics().feeds},
        benefit=benefit.series(),
    )
