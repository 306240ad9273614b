"""Checks the laws that can be checked from outside an idle engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvoffload.telemetry.snapshot import conservation

if TYPE_CHECKING:
    from kvoffload.engine import Engine
    from kvoffload.runtime.scheduler_side import SchedulerSide

_AT_REST = {"empty", "ready", "quarantined"}


def audit_engine(engine: Engine, name: str) -> list[str]:
    """Return what an idle engine still holds, and the laws that it breaks."""
    numbers = engine.statistics()
    held = {
        "waiting requests": numbers.waiting,
        "loading requests": numbers.loading,
        "running requests": numbers.running,
        "leased blocks": numbers.leased_blocks,
        "blocks in use": engine.pool.usable_blocks - numbers.free_blocks,
    }
    left = [f"{number} {what} are left" for what, number in held.items() if number]
    return [f"{name}: {problem}" for problem in (*engine.audit(), *left)]


def audit_offloading(offload: SchedulerSide) -> list[str]:
    """Return the laws that idle offloading breaks."""
    return [f"offloading: {problem}" for problem in _problems(offload)]


def _problems(offload: SchedulerSide) -> Iterator[str]:
    yield from offload.audit()
    yield from conservation(offload.counters.snapshot(), drained=True)
    state = offload.gauges()
    yield from state.problems()
    if state.degraded is not None:
        yield f"it was switched off: {state.degraded.value}"
    for tier, slots_by_state, open_jobs in (
        ("host", state.slots, state.open_jobs),
        ("disk", state.disk.slots, state.disk.open_jobs),
    ):
        for name, slots in slots_by_state.items():
            if slots and name not in _AT_REST:
                yield f"{slots} slots of the {tier} are still {name}"
        for (direction, name), jobs in open_jobs.items():
            if jobs and name != "abandoned":  # counted separately
                yield f"{jobs} {direction} jobs of the {tier} are still {name}"
