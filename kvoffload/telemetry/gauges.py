"""Numbers that are read at a scrape, because only their owners have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvoffload.model.causes import DegradeCause
from kvoffload.model.transfer import Tier
from kvoffload.telemetry.labels import HostBytes, TierState, subscriber_label
from kvoffload.telemetry.snapshot import Labels

BENEFIT = (
    "kvoffload_prefill_seconds_saved_total",
    "kvoffload_load_wait_seconds_total",
    "kvoffload_interference_seconds_total",
    "kvoffload_prefill_tokens_per_second",
    "kvoffload_break_even_tokens",
    "kvoffload_fetch_break_even_tokens",
    "kvoffload_net_benefit_negative",
)
"""The metrics of `NetBenefit`."""

ASKED_COUNTERS = frozenset(
    name for name in ("kvoffload_bus_dropped_total", *BENEFIT) if name.endswith("_total")
)
"""Counters that their owners keep. They are read like gauges, not counted from events."""


@dataclass(frozen=True, slots=True)
class TierGauges:
    """A tier below the host at one moment.

    Args:
        state: what it does.
        slots: its slots by the state's label.
        capacity_slots: that every rank has.
        slot_bytes: one slot on all ranks together.
        open_jobs: between the host and it, by the labels of direction and state.
    """

    state: TierState = TierState.OFF
    slots: Mapping[str, int] = field(default_factory=dict)
    capacity_slots: int = 0
    slot_bytes: int = 0
    open_jobs: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GaugeSnapshot:
    """The state at one moment. A missing entry of a mapping is 0.

    Args:
        slots: host slots by the state's label.
        capacity_slots: slots that are ready on every rank.
        open_jobs: jobs between device and host that have not ended on every rank, by the labels of direction and state.
        oldest_pin_s: unix time of the oldest pin, 0 without one.
        oldest_job_s: unix time at which the oldest open job was submitted, 0 without one.
        abandoned_blocks: device blocks that abandoned copies hold.
        copies_stalled: no new copy starts.
        reset_draining_jobs: jobs from before the last reset that have not ended.
        store_share: the limit on store bytes in flight as a share of its maximum, on the slowest rank.
        degraded: why offloading is off, None while it is on.
        dropped: events dropped so far, by feed.
        benefit: the series of `NetBenefit`.
        host_bytes: bytes of host memory.
        info: the label values of `kvoffload_info`; None if not known.
        slot_bytes: one host slot on all ranks together.
        disk: the tier below the host.
        remote: what the store does that engines share.
    """

    slots: Mapping[str, int] = field(default_factory=dict)
    capacity_slots: int = 0
    open_jobs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    oldest_pin_s: float = 0.0
    oldest_job_s: float = 0.0
    abandoned_blocks: int = 0
    copies_stalled: bool = False
    reset_draining_jobs: int = 0
    store_share: float = 1.0
    degraded: DegradeCause | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    benefit: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    host_bytes: Mapping[HostBytes, int] = field(default_factory=dict)
    info: Labels | None = None
    slot_bytes: int = 0
    disk: TierGauges = field(default_factory=TierGauges)
    remote: TierState = TierState.OFF

    def numbers(self) -> dict[str, dict[Labels, float]]:
        """Return the series of every metric that is not counted from events, by name. A missing one is 0."""
        host, disk = Tier.HOST.value, Tier.DISK.value
        dropped: dict[Labels, float] = {}
        for name, events in self.dropped.items():
            labels = (subscriber_label(name),)
            dropped[labels] = dropped.get(labels, 0) + events
        return {
            "kvoffload_slots": {
                (tier, name): count
                for tier, slots in ((host, self.slots), (disk, self.disk.slots))
                for name, count in slots.items()
            },
            "kvoffload_slot_bytes": {(host,): self.slot_bytes, (disk,): self.disk.slot_bytes},
            "kvoffload_tier_state": {
                (disk, self.disk.state.value): 1,
                (Tier.REMOTE.value, self.remote.value): 1,
            },
            "kvoffload_host_bytes": {(part.value,): size for part, size in self.host_bytes.items()},
            "kvoffload_info": {self.info: 1} if self.info is not None else {},
            "kvoffload_capacity_slots": {(host,): self.capacity_slots, (disk,): self.disk.capacity_slots},
            "kvoffload_open_jobs": {
                (tier, *job): count
                for tier, jobs in ((host, self.open_jobs), (disk, self.disk.open_jobs))
                for job, count in jobs.items()
            },
            "kvoffload_oldest_pin_timestamp_seconds": {(): self.oldest_pin_s},
            "kvoffload_oldest_job_timestamp_seconds": {(): self.oldest_job_s},
            "kvoffload_store_bound_ratio": {(): self.store_share},
            "kvoffload_abandoned_device_blocks": {(): self.abandoned_blocks},
            "kvoffload_copies_stalled": {(): int(self.copies_stalled)},
            "kvoffload_reset_draining_jobs": {(): self.reset_draining_jobs},
            "kvoffload_degraded": {(self.degraded.value,): 1} if self.degraded else {},
            "kvoffload_bus_dropped_total": dropped,
            **{name: dict(self.benefit.get(name, {})) for name in BENEFIT},
        }

    def problems(self) -> list[str]:
        """Return every conservation law that these numbers break, as text."""
        return [
            f"slots of the {tier.value} by state sum to {total}, but the capacity is {capacity}"
            for tier, slots, capacity in (
                (Tier.HOST, self.slots, self.capacity_slots),
                (Tier.DISK, self.disk.slots, self.disk.capacity_slots),
            )
            if (total := sum(slots.values())) != capacity
        ]


class GaugeSource(Protocol):
    """Has the state. It is called on the scraping thread, so it must only read what is safe to read there."""

    def gauges(self) -> GaugeSnapshot:
        """Return the state now."""
