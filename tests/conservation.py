"""Checks sums of metrics: each total equals the sum of its outcomes, and the numbers of slots in all states
add up to the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvoffload.model.causes import CopyOutcome
from kvoffload.telemetry.catalogue import LookupResult, Series
from kvoffload.telemetry.counters import Snapshot

_OUTCOMES_OF = {
    "kvoffload_offered_blocks_total": "kvoffload_store_blocks_total",
    "kvoffload_load_scheduled_blocks_total": "kvoffload_load_blocks_total",
    "kvoffload_tier_scheduled_blocks_total": "kvoffload_tier_blocks_total",
}


def slot_problems(gauges: Mapping[str, Series]) -> list[str]:
    """Return one line for each tier whose slots in all states do not add up to its capacity."""
    problems = []
    for (tier,), capacity in gauges.get("kvoffload_capacity_slots", {}).items():
        total = sum(count for (of, _), count in gauges["kvoffload_slots"].items() if of == tier)
        if total != capacity:
            problems.append(f"slots of the {tier} by state sum to {total}, but the capacity is {capacity}")
    return problems


def conservation(snapshot: Snapshot, *, drained: bool = False) -> list[str]:
    """Return one line for each broken invariant.

    Args:
        snapshot: all counts since the start.
        drained: if True, no job and no offer is open, so each total must equal the sum of its outcomes.
    """
    missed = snapshot.count("kvoffload_lookup_blocks_total", LookupResult.MISS.value)
    causes = snapshot.total("kvoffload_miss_blocks_total")
    problems = [] if missed == causes else [f"{missed} blocks missed, but the causes sum to {causes}"]
    for total_name, outcome_name in _OUTCOMES_OF.items():
        total, outcomes = snapshot.total(total_name), snapshot.total(outcome_name)
        if outcomes > total or (drained and outcomes < total):
            problems.append(f"{total_name} is {total}, but {outcome_name} sums to {outcomes}")
    for (*series, outcome), copies in snapshot.counts.get("kvoffload_transfers_total", {}).items():
        for name in ("kvoffload_transfer_seconds", "kvoffload_transfer_queue_seconds"):
            samples = snapshot.samples(name, *series)
            if outcome == CopyOutcome.DONE.value and samples != copies:
                problems.append(
                    f"{copies} copies ({', '.join(series)}) succeeded, but {name} has {samples} samples"
                )
    problems += [
        f"{name}{list(labels)} is {number}, and counters never shrink"
        for name, series in snapshot.counts.items()
        for labels, number in series.items()
        if number < 0
    ]
    return problems
