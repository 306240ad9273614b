"""What a rank's threads take from an engine whose steps are bound by Python, and how often they wake.

A step here is a fixed piece of Python and the look for reports that every step takes. It is timed with the threads gone,
with them there and nothing pending, and with stores pending all the time, in turns. Wake-ups are those of the transfer
coroutine, and what the system says of all the process's other threads: how often they gave up or lost a core.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from typing import TYPE_CHECKING

from kvoffload.bench.copy_lanes import lanes
from kvoffload.bench.spread import Spread

if TYPE_CHECKING:
    from kvoffload.bench.copy_lanes import Lanes

STEPS = 100
_PAGE = 64 * 2**10
_SETTLE_S = 0.05  # until what ended before has gone to sleep
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Steps:
    """What was measured.

    Args:
        seconds: median step of each repeat, by what goes on: "gone", "idle" and "pending".
        wake_ups: of the transfer coroutine while nothing was pending, in all repeats together.
        switches: of all other threads in that time; None where the system does not say.
        steps: taken in each repeat.
    """

    seconds: Mapping[str, Sequence[float]]
    wake_ups: int
    switches: int | None
    steps: int

    def ratio(self, name: str) -> Spread:
        """Step time over that without threads, in pairs."""
        pairs = zip(self.seconds[name], self.seconds["gone"], strict=True)
        return Spread.of([mine / gone for mine, gone in pairs])

    def to_plain(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "step_ms": Spread.of([1e3 * one for one in self.seconds["gone"]]).to_plain(),
            "steps": self.steps,
            "nothing_pending": self.ratio("idle").to_plain(),
            "copies_pending": self.ratio("pending").to_plain(),
            "wake_ups_with_nothing_pending": self.wake_ups,
            "thread_switches_with_nothing_pending": self.switches,
        }


def measure_steps(size: int, repeats: int, steps: int = STEPS) -> Steps:
    """Time steps with `size` bytes of stores pending at a time, host memory to host memory."""
    seconds: dict[str, list[float]] = {"gone": [], "idle": [], "pending": []}
    wake_ups, switches = 0, 0 if _TASKS.exists() else None
    for repeat in range(repeats + 1):
        found = {}
        if repeat % 2:  # else afterwards
            found["gone"] = _median_step(steps, lambda: None)
        with lanes("cpu", size, _PAGE) as made:
            time.sleep(_SETTLE_S)
            before, switched = made.side.pump.statistics().wake_ups, _switches()
            found["idle"] = _median_step(steps, made.side.take_report)
            if repeat:
                wake_ups += made.side.pump.statistics().wake_ups - before
                switches = None if switches is None else switches + _switches() - switched
            found["pending"] = _median_step(steps, _keeping_pending(made))
            made.settle()
        if not repeat % 2:
            found["gone"] = _median_step(steps, lambda: None)
        if repeat:  # the first warms up
            for name, median in found.items():
                seconds[name].append(median)
    return Steps(seconds, wake_ups, switches, steps * repeats)


def _median_step(steps: int, hook: Callable[[], object]) -> float:
    taken = []
    for _ in range(steps):
        begun = time.perf_counter()
        _work()
        hook()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _work() -> int:
    """About two milliseconds of what schedulers do: look up, count, make small objects."""
    table: dict[int, list[int]] = {}
    for number in range(8_000):
        table.setdefault(number % 97, []).append(number)
    return sum(len(row) for row in table.values())


def _keeping_pending(made: Lanes) -> Callable[[], object]:
    """Return a step's hook that queues more stores before those that it has queued have ended."""

    def hook() -> None:
        made.look()
        if made.open_jobs < 2:
            made.queue_stores()

    return hook


def _switches() -> int:
    """How often the process's other threads gave up or lost a core, as far as the system says."""
    mine, found = str(get_native_id()), 0
    for task in os.scandir(_TASKS) if _TASKS.exists() else ():
        if task.name != mine:
            lines = Path(task.path, "status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found
