"""Calls the hooks of one rank's worker side as an engine on a CPU does, and prints what they took as JSON.

`tests/bench/worker.py` runs this file as a script, with the packages of another checkout, too. So the file uses only what
many versions of kvoffload have.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from itertools import count
from typing import Any

import torch

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.wire import CopyJob, Direction, Tier, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.layout import layout_of

BLOCKS = 8
"""The blocks of a job."""
_REGIONS = 8
_DEVICE_BLOCKS = 64
_PASS_S = 0.01
"""A forward pass, in which the engine's thread holds no lock. The copies of a step end in it."""


class Worker:
    def __init__(self, portal: Portal, page: int) -> None:
        tensors = [torch.zeros(_DEVICE_BLOCKS, page, dtype=torch.uint8) for _ in range(_REGIONS)]
        layout = layout_of(tensors)
        config = OffloadConfig(host_bytes=_DEVICE_BLOCKS * layout.slot_bytes)
        self._tensors = tensors  # the copies use their memory
        self._numbers = count()
        self._wakes = 0
        self._draw = random.Random(0)
        self.side = WorkerSide(Rank(0), 1, config, portal)
        self._slots, ready = self.side.register(layout), 0
        while ready < self._slots:
            time.sleep(_PASS_S)
            report = self.side.take_report()
            ready = ready if report is None else report.ready_slots
        self._count_wakes(portal)

    def store_us(self) -> float:
        """Return the time in the hooks of a step that starts a store. Wait until the store has ended."""
        plan = TransferPlan(stores=(self._job(Direction.STORE),))
        began = time.perf_counter_ns()
        self.side.begin_step(plan)
        self.side.start_loads(plan)
        self.side.start_stores(plan)
        report = self.side.take_report()
        took = time.perf_counter_ns() - began
        while report is None or not report.jobs:
            time.sleep(_PASS_S)
            report = self.side.take_report()
        _check(report)
        time.sleep(_PASS_S)
        return took / 1e3

    def load_us(self) -> float:
        """Return the time from a load's start until the engine, which does nothing else, knows that it has ended."""
        plan, report = TransferPlan(loads=(self._job(Direction.LOAD),)), None
        began = time.perf_counter_ns()
        self.side.begin_step(plan)
        self.side.start_loads(plan)
        while report is None or not report.jobs:
            time.sleep(0)
            report = self.side.take_report()
        took = time.perf_counter_ns() - began
        _check(report)
        time.sleep(_PASS_S)
        return took / 1e3

    def turn(self, steps: int) -> dict[str, float]:
        """Return the medians of the times of such steps, and how often a store wakes the event loop's thread."""
        before = self._wakes
        stores = [self.store_us() for _ in range(steps)]
        wakes = (self._wakes - before) / steps
        loads = [self.load_us() for _ in range(steps)]
        return {
            "store_us": statistics.median(stores),
            "load_us": statistics.median(loads),
            "wakes": wakes,
        }

    def _count_wakes(self, portal: Portal) -> None:
        started = portal._loop_thread
        assert started is not None
        selector: Any = started[0]._selector  # type: ignore[attr-defined]
        select = selector.select

        def counted(timeout: float | None = None) -> Any:
            events = select(timeout)
            self._wakes += timeout != 0
            return events

        selector.select = counted

    def _job(self, way: Direction) -> CopyJob[Any, Any]:
        slots = self._draw.sample(range(self._slots), BLOCKS)
        blocks = self._draw.sample(range(1, _DEVICE_BLOCKS), BLOCKS)
        number = JobId(next(self._numbers))
        return CopyJob(
            number, way, Tier.HOST, tuple(map(SlotId, slots)), tuple(map(DeviceBlockId, blocks)), None
        )


def _check(report: Any) -> None:
    (job,) = report.jobs
    assert job.outcome is CopyOutcome.DONE, job


def main(steps: str, page_kib: str) -> None:
    """Take a turn, and print its figures, whenever a line arrives."""
    portal = Portal("kvoffload-bench")
    worker = Worker(portal, int(page_kib) * 2**10)
    gc.disable()
    for _ in sys.stdin:
        print(json.dumps(worker.turn(int(steps))), flush=True)
    worker.side.close()
    portal.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
