"""What a process holds at one moment, and by how much that grew after the warm-up.

A moment is one at which nothing goes on: no request, no copy. What is left then is either there for good or leaked. Single
moments are noisy (an allocator gives memory back when it likes), so the first quarter of the moments after the warm-up is
compared with the last, each by its median.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoffload.telemetry.catalogue import Series

MOST = 0.01  # growth that passes
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OWN_MATTER = frozenset(
    # Estimates of how fast the machine is, as it was last measured: nothing that is held.
    ["kvoffload_prefill_tokens_per_second", "kvoffload_break_even_tokens", "kvoffload_net_benefit_negative"]
)

Reading = Mapping[str, float]


def read(gauges: Mapping[str, Series]) -> Reading:
    """Return what is held now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return {
        "resident MiB": resident / 2**20,
        "open descriptors": len(os.listdir("/proc/self/fd")),
        "Python objects": len(gc.get_objects()),
        **_of_gauges(gauges),
    }


def _of_gauges(gauges: Mapping[str, Series]) -> dict[str, float]:
    """Every gauge, but for slots that can be used: how many of them are full depends on the last reset."""
    slots = gauges["kvoffload_slots"]
    found: dict[str, float] = {"slots empty or ready": slots["host", "empty"] + slots["host", "ready"]}
    for name, series in gauges.items():
        if name.endswith("_total") or name in _OWN_MATTER:
            continue
        for labels, value in series.items():
            if labels[-1:] not in (("empty",), ("ready",)):
                found[" ".join((name.removeprefix("kvoffload_"), *labels))] = value
    return found


@dataclass(frozen=True)
class Growth:
    """One number, after the warm-up and at the end."""

    name: str
    start: float
    end: float

    @property
    def share(self) -> float:
        """By how much it grew; what was 0 and is not any more grew without measure."""
        if self.end <= self.start:
            return 0.0
        return (self.end - self.start) / self.start if self.start else float("inf")

    @property
    def passed(self) -> bool:
        return self.share <= MOST


def growth_of(readings: Sequence[Reading]) -> list[Growth]:
    """Compare the first quarter of the readings after the warm-up with the last."""
    quarter = max(len(readings) // 4, 1)
    first, last = readings[:quarter], readings[-quarter:]

    def middle(part: Sequence[Reading], name: str) -> float:
        return statistics.median(one.get(name, 0.0) for one in part)

    names = dict.fromkeys(name for one in (*first, *last) for name in one)
    return [Growth(name, middle(first, name), middle(last, name)) for name in names]


def table(found: Sequence[Growth]) -> str:
    """Return a line for every number, those that never left 0 in one."""
    lines = [f"{'':42}{'after warm-up':>15}{'at the end':>15}{'growth':>10}"]
    still = [one.name for one in found if not one.start and not one.end]
    lines += [
        f"{one.name:42}{one.start:15,.1f}{one.end:15,.1f}{one.share:10.2%}{'' if one.passed else '  GROWS'}"
        for one in found
        if one.name not in still
    ]
    return "\n".join([*lines, f"0 throughout: {', '.join(still)}"])
