"""Measures the time of loads while stores are queued.

The bench calls the worker side as an engine's hooks would, and polls as often as an engine with short steps. A
load's time is from its submission to the poll that reports it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.wire import CopyJob, DeviceJob, Direction, Tier, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.layout import layout_of
from tests.bench.copy_rig import WrongBytes
from tests.bench.lines import Line, line, ratios

if TYPE_CHECKING:
    from kvoffload.transfer.runs import Numbers

REGIONS = 8
PAGE = 64 * 2**10
STORES = 4  # the bytes of all queued stores, as a multiple of a load's bytes
_POLL_S = 0.0002
_HEAD_START_S = 0.005  # long enough that the first stores have begun


class Lanes:
    """One rank's worker side, with random bytes on the device.

    Args:
        blocks: the number of blocks in a load. The device has six times as many.
        portal: runs the transfer coroutines.
    """

    def __init__(self, blocks: int, portal: Portal) -> None:
        self._count = blocks
        self._blocks = (STORES + 2) * blocks
        self._tensors = [
            torch.randint(0, 256, (self._blocks, PAGE), dtype=torch.uint8) for _ in range(REGIONS)
        ]
        layout = layout_of(self._tensors)
        self.side = WorkerSide(Rank(0), 1, OffloadConfig(host_bytes=self._blocks * layout.slot_bytes), portal)
        slots = self.side.register(layout)
        self._numbers = count()
        self._draw = np.random.default_rng(0)
        ready = 0
        while ready < slots:
            report = self.side.take_report()
            ready = ready if report is None else report.ready_slots
            time.sleep(_POLL_S)

    def load_seconds(self, *, stores: bool) -> float:
        """Return the seconds of a load of scattered blocks, with or without stores queued before the load."""
        order = self._draw.permutation(self._blocks)
        blocks, slots = self._draw.permutation(order), order
        behind = slice(2 * self._count, None)
        queued = self._jobs(Direction.STORE, slots[behind], blocks[behind], STORES) if stores else ()
        if queued:
            self.side.start_stores(TransferPlan(stores=queued))
            time.sleep(_HEAD_START_S)
        (load,) = self._jobs(Direction.LOAD, slots[: self._count], blocks[: self._count], 1)
        begun = time.perf_counter()
        self.side.start_loads(TransferPlan(loads=(load,)))
        left = {job.id for job in (load, *queued)}
        while load.id in left:
            self._take(left)
        seconds = time.perf_counter() - begun
        self._finish(left)
        return seconds

    def check(self) -> None:
        """Store blocks, load the stored bytes into other blocks, and compare the blocks.

        Raises:
            WrongBytes: a byte differs.
        """
        order = self._draw.permutation(self._blocks)
        slots, source, target = (
            order[: self._count],
            order[: self._count],
            order[self._count : 2 * self._count],
        )
        stores = self._jobs(Direction.STORE, slots, source, 1)
        self.side.start_stores(TransferPlan(stores=stores))
        self._finish({stores[0].id})
        loads = self._jobs(Direction.LOAD, slots, target, 1)
        self.side.start_loads(TransferPlan(loads=loads))
        self._finish({loads[0].id})
        if any(not torch.equal(tensor[source], tensor[target]) for tensor in self._tensors):
            raise WrongBytes("a block that was stored and loaded again differs")

    def _finish(self, left: set[JobId]) -> None:
        while left:
            self._take(left)

    def _take(self, left: set[JobId]) -> None:
        """Take a report, and remove the reported jobs from `left`. Without a report, sleep briefly."""
        report = self.side.take_report()
        if report is None:
            time.sleep(_POLL_S)
            return
        for job in report.jobs:
            if job.outcome is not CopyOutcome.DONE:
                raise WrongBytes(f"a {job.direction.value} has ended as {job.outcome.value}")
            left.discard(job.job)

    def _jobs(self, way: Direction, slots: Numbers, blocks: Numbers, parts: int) -> tuple[DeviceJob, ...]:
        return tuple(
            CopyJob(
                JobId(next(self._numbers)),
                way,
                Tier.HOST,
                tuple(map(SlotId, some.tolist())),
                tuple(map(DeviceBlockId, others.tolist())),
                None,
            )
            for some, others in zip(np.array_split(slots, parts), np.array_split(blocks, parts), strict=True)
        )


def measure_loads(size: int, repeats: int) -> Iterator[Line]:
    """Time loads of `size` bytes, alternately with and without stores queued before the load."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    portal = Portal("kvoffload-bench")
    lanes = Lanes(max(size // (PAGE * REGIONS), 1), portal)
    try:
        lanes.check()
        for repeat in range(repeats + 1):
            for stores in (False, True) if repeat % 2 else (True, False):
                took = lanes.load_seconds(stores=stores)
                if repeat:  # The first pair is a warm-up.
                    seconds[stores].append(took)
    finally:
        lanes.side.close()
        portal.close()
    mib = size // 2**20
    what = f"a load of {mib} MiB while {STORES * mib} MiB of stores are queued, over the load alone"
    yield line(what, ratios(seconds[True], seconds[False]), at_most=1.2)
    yield line(f"a load of {mib} MiB alone", [1e3 * one for one in seconds[False]], " ms")
