"""What a rank's threads take from an engine whose steps are bound by Python, and how often they wake.

A step here is a fixed piece of Python and the look for reports that every step takes. It is timed with the threads gone,
with them there and nothing pending, and with stores pending all the time, in turns. Wake-ups are those of the transfer
coroutine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from kvoffload.bench.copy_lanes import Lanes, lanes
from kvoffload.bench.lines import Line, line, ratios

STEPS = 100
_PAGE = 64 * 2**10
_SETTLE_S = 0.05  # until what ended before has gone to sleep


def measure_steps(size: int, repeats: int) -> list[Line]:
    """Time steps with `size` bytes of stores pending at a time, host memory to host memory."""
    seconds: dict[str, list[float]] = {"gone": [], "idle": [], "pending": []}
    wake_ups = 0
    for repeat in range(repeats + 1):
        found = {}
        if repeat % 2:  # else afterwards
            found["gone"] = _median_step(lambda: None)
        with lanes("cpu", size, _PAGE) as made:
            time.sleep(_SETTLE_S)
            before = made.side.pump.statistics().wake_ups
            found["idle"] = _median_step(made.side.take_report)
            woken = made.side.pump.statistics().wake_ups - before
            found["pending"] = _median_step(_keeping_pending(made))
            made.settle()
        if not repeat % 2:
            found["gone"] = _median_step(lambda: None)
        if repeat:  # the first warms up
            wake_ups += woken
            for name, median in found.items():
                seconds[name].append(median)
    idle = line(
        "step bound by Python, nothing pending, over no threads", ratios(seconds["idle"], seconds["gone"])
    )
    # 1.00 is met where the measurement cannot tell it from 1.00.
    idle = replace(idle, target="1x", is_met=idle.low is None or idle.low <= 1.0)
    what = "step bound by Python, copies pending, over no threads"
    pending = line(what, ratios(seconds["pending"], seconds["gone"]), at_most=1.05)
    steps = f"wake-ups in {STEPS * repeats:,} steps with nothing pending"
    return [idle, Line(steps, wake_ups, unit="", target="0", is_met=wake_ups == 0), pending]


def _median_step(hook: Callable[[], object]) -> float:
    taken = []
    for _ in range(STEPS):
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
