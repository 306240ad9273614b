"""Numbers at one moment, for exporters, the demo's table and other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.labels import LookupResult

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """One series of a histogram.

    Args:
        counts: samples per bucket (not cumulative), the last one for samples above every bound.
        total: sum of the samples.
    """

    counts: tuple[int, ...]
    total: float

    @property
    def samples(self) -> int:
        return sum(self.counts)

    def minus(self, earlier: Distribution) -> Distribution:
        counts = tuple(now - before for now, before in zip(self.counts, earlier.counts, strict=True))
        return Distribution(counts, self.total - earlier.total)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fixed copy, by metric name and label values, in the catalogue's order of labels. A missing series is 0."""

    counts: Mapping[str, Mapping[Labels, int]] = field(default_factory=dict)
    distributions: Mapping[str, Mapping[Labels, Distribution]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it has no series, as the difference of two equal ones."""
        return not self.counts and not self.distributions

    def count(self, name: str, *labels: str) -> int:
        """Return one counter."""
        return self.counts.get(name, {}).get(labels, 0)

    def total(self, name: str) -> int:
        """Return the sum of a counter over all its labels."""
        return sum(self.counts.get(name, {}).values())

    def samples(self, name: str, *labels: str) -> int:
        """Return the number of samples of one series of a histogram."""
        series = self.distributions.get(name, {}).get(labels)
        return series.samples if series else 0

    def minus(self, earlier: Snapshot) -> Snapshot:
        """Return what was added since `earlier`, without the series that did not change."""
        counts = {
            name: {
                labels: number - earlier.count(name, *labels)
                for labels, number in series.items()
                if number != earlier.count(name, *labels)
            }
            for name, series in self.counts.items()
        }
        distributions = {
            name: _changed(series, earlier.distributions.get(name, {}))
            for name, series in self.distributions.items()
        }
        return Snapshot(_without_empty(counts), _without_empty(distributions))


def conservation(snapshot: Snapshot, *, drained: bool = False) -> list[str]:
    """Return every conservation law that the numbers break, as text.

    Args:
        snapshot: everything since the start.
        drained: no job and no offer is open, so outcomes must equal their totals.
    """
    missed = snapshot.count("kvoffload_lookup_blocks_total", LookupResult.MISS.value)
    causes = snapshot.total("kvoffload_miss_blocks_total")
    problems = [] if missed == causes else [f"{missed} blocks missed, but the causes sum to {causes}"]
    problems += _check_outcomes(
        snapshot, "kvoffload_offered_blocks_total", "kvoffload_store_blocks_total", drained
    )
    problems += _check_outcomes(
        snapshot, "kvoffload_load_scheduled_blocks_total", "kvoffload_load_blocks_total", drained
    )
    problems += _check_outcomes(
        snapshot, "kvoffload_tier_scheduled_blocks_total", "kvoffload_tier_blocks_total", drained
    )
    for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE):
        for direction in Direction:
            problems += _check_copies(snapshot, tier.value, direction.value)
    problems += [
        f"{name}{list(labels)} is {number}, and counters never shrink"
        for name, series in snapshot.counts.items()
        for labels, number in series.items()
        if number < 0
    ]
    return problems


def _check_outcomes(snapshot: Snapshot, total_name: str, outcome_name: str, drained: bool) -> list[str]:
    total, outcomes = snapshot.total(total_name), snapshot.total(outcome_name)
    if outcomes > total or (drained and outcomes < total):
        return [f"{total_name} is {total}, but {outcome_name} sums to {outcomes}"]
    return []


def _check_copies(snapshot: Snapshot, *series: str) -> list[str]:
    done = snapshot.count("kvoffload_transfers_total", *series, CopyOutcome.DONE.value)
    return [
        f"{done} copies ({', '.join(series)}) succeeded, but {name} has {samples} samples"
        for name in ("kvoffload_transfer_seconds", "kvoffload_transfer_queue_seconds")
        if (samples := snapshot.samples(name, *series)) != done
    ]


def _changed(
    series: Mapping[Labels, Distribution], earlier: Mapping[Labels, Distribution]
) -> dict[Labels, Distribution]:
    changed = {}
    for labels, now in series.items():
        before = earlier.get(labels)
        delta = now.minus(before) if before else now
        if delta.samples:
            changed[labels] = delta
    return changed


def _without_empty(table: dict[str, dict[Labels, Any]]) -> dict[str, dict[Labels, Any]]:
    return {name: series for name, series in table.items() if series}
