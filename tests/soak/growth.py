"""Reads the resources that a process holds, and computes the growth after the warm-up.

Readings are taken when no request and no copy is open, so that everything left is either permanent or leaked.
Single readings are noisy, because an allocator may release memory at any time. So the median of the first
quarter of the readings after the warm-up is compared with the median of the last quarter.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoffload.telemetry.catalogue import Series

MOST = 0.01  # the largest relative growth that passes
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OWN_MATTER = frozenset(
    # These gauges are estimates of the machine's speed and of the traffic, so their growth is not a leak.
    ["kvoffload_prefill_tokens_per_second", "kvoffload_break_even_tokens", "kvoffload_net_benefit_negative"]
)
_PREDICTED = ("kvoffload_predicted_", "kvoffload_next_gib_")

Reading = Mapping[str, float]


def read(gauges: Mapping[str, Series]) -> Reading:
    """Return the numbers of open descriptors and Python objects, the resident memory, and all gauges."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return {
        "resident MiB": resident / 2**20,
        "open descriptors": len(os.listdir("/proc/self/fd")),
        "Python objects": len(gc.get_objects()),
        **_of_gauges(gauges),
    }


def _of_gauges(gauges: Mapping[str, Series]) -> dict[str, float]:
    """Return every gauge. Empty and ready slots are summed, because a reset moves slots between these states."""
    slots = gauges["kvoffload_slots"]
    found: dict[str, float] = {"slots empty or ready": slots["host", "empty"] + slots["host", "ready"]}
    for name, series in gauges.items():
        if name.endswith("_total") or name in _OWN_MATTER or name.startswith(_PREDICTED):
            continue
        for labels, value in series.items():
            if labels[-1:] not in (("empty",), ("ready",)):
                found[" ".join((name.removeprefix("kvoffload_"), *labels))] = value
    return found


@dataclass(frozen=True)
class Growth:
    """The value of one number after the warm-up and at the end."""

    name: str
    start: float
    end: float

    @property
    def share(self) -> float:
        """Return the relative growth, or infinity if the number was 0."""
        if self.end <= self.start:
            return 0.0
        return (self.end - self.start) / self.start if self.start else float("inf")

    @property
    def passed(self) -> bool:
        return self.share <= MOST


def growth_of(readings: Sequence[Reading]) -> list[Growth]:
    """Compare the first quarter of the readings after the warm-up with the last quarter."""
    quarter = max(len(readings) // 4, 1)
    first, last = readings[:quarter], readings[-quarter:]

    def middle(part: Sequence[Reading], name: str) -> float:
        return statistics.median(one.get(name, 0.0) for one in part)

    names = dict.fromkeys(name for one in (*first, *last) for name in one)
    return [Growth(name, middle(first, name), middle(last, name)) for name in names]


def table(found: Sequence[Growth]) -> str:
    """Return a table with a line for each number. Its last line names the numbers that were always 0."""
    lines = [f"{'':42}{'after warm-up':>15}{'at the end':>15}{'growth':>10}"]
    still = [one.name for one in found if not one.start and not one.end]
    lines += [
        f"{one.name:42}{one.start:15,.1f}{one.end:15,.1f}{one.share:10.2%}{'' if one.passed else '  GROWS'}"
        for one in found
        if one.name not in still
    ]
    return "\n".join([*lines, f"0 throughout: {', '.join(still)}"])
