"""The state at one moment, for a scrape. Reads single numbers only, so any thread may call it."""

from __future__ import annotations

from kvoffload.bus.bus import Bus
from kvoffload.core.jobs import Jobs
from kvoffload.core.machine import JobState, SlotState
from kvoffload.core.state import CoreState
from kvoffload.core.tiers import DiskTier, RemoteTier
from kvoffload.model.causes import DegradeCause
from kvoffload.model.transfer import Direction, Tier
from kvoffload.runtime.benefit import NetBenefit
from kvoffload.runtime.host_memory import HostMemory
from kvoffload.runtime.open_copies import OpenCopies
from kvoffload.runtime.pin_ages import PinAges
from kvoffload.runtime.resets import Resets
from kvoffload.runtime.watchdog import Since
from kvoffload.telemetry.gauges import GaugeSnapshot, TierGauges
from kvoffload.telemetry.labels import HostBytes, TierState, label_of
from kvoffload.telemetry.snapshot import Labels

_EMPTY = label_of(SlotState.EMPTY)
_HOLDING = (JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED)
_PLANNED, _SUBMITTED, _ABANDONED = map(label_of, _HOLDING)


def read_gauges(
    state: CoreState,
    bus: Bus,
    pins: PinAges,
    copies: OpenCopies,
    resets: Resets,
    benefit: NetBenefit,
    store_share: float,
    memory: HostMemory,
    degraded: DegradeCause | None,
    info: Labels,
) -> GaugeSnapshot:
    """Return the current state."""
    slots = {label_of(each): state.pool.count(each) for each in SlotState}
    in_use = sum(slots.values()) - slots[_EMPTY]
    jobs = {}
    for way in Direction:
        jobs[way.value, _PLANNED] = state.jobs.count(way, JobState.PLANNED)
        jobs[way.value, _SUBMITTED] = copies.count(way, is_overdue=False)
        jobs[way.value, _ABANDONED] = copies.count(way, is_overdue=True)
    return GaugeSnapshot(
        slots=slots,
        capacity_slots=sum(slots.values()),
        open_jobs=jobs,
        oldest_pin_s=_unix(pins.oldest),
        oldest_job_s=_unix(copies.oldest),
        abandoned_blocks=state.stall.blocks,
        copies_stalled=state.stall.is_on,
        reset_draining_jobs=resets.draining,
        store_share=store_share,
        degraded=degraded,
        dropped={name: feed.dropped for name, feed in bus.statistics().feeds},
        benefit=benefit.series(),
        host_bytes={
            HostBytes.WANTED: memory.wanted_bytes,
            HostBytes.RESERVED: memory.reserved_bytes,
            HostBytes.USED: in_use * memory.block_bytes,
        },
        info=info,
        slot_bytes=memory.block_bytes,
        disk=_disk_gauges(state.disk, state.jobs, memory) if state.disk is not None else TierGauges(),
        remote=TierState.OFF if state.remote is None else _remote_state(state.remote),
    )


def _disk_gauges(disk: DiskTier, jobs: Jobs, memory: HostMemory) -> TierGauges:
    slots = {label_of(each): disk.pool.count(each) for each in SlotState}
    slots[label_of(SlotState.QUARANTINED)] -= (
        disk.pool.capacity - disk.capacity
    )  # those without space on disk
    return TierGauges(
        state=_state(disk),
        slots=slots,
        capacity_slots=disk.capacity,
        slot_bytes=memory.disk_block_bytes,
        open_jobs={
            (way.value, label_of(state)): jobs.count(way, state, Tier.DISK)
            for way in Direction
            for state in _HOLDING
        },
    )


def _state(disk: DiskTier) -> TierState:
    if disk.is_closed:
        return TierState.CLOSED
    if not disk.is_open:
        return TierState.OPENING
    return TierState.OPEN if disk.is_usable else TierState.FAILING


def _remote_state(remote: RemoteTier) -> TierState:
    if not remote.namespace:
        return TierState.OPENING
    return TierState.OPEN if remote.is_usable else TierState.FAILING


def _unix(since: Since | None) -> float:
    return since.unix if since is not None else 0.0
