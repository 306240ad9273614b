"""What a transfer pump makes of copies: a load while stores are queued, and what submitting adjacent blocks costs.

Both go through the worker's side as an engine's hooks use it. A load's time is from the hook that submits it to the look
that finds it reported; looks are as far apart as the steps of a fast engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvoffload.bench.copy_rig import Rig, WrongBytes
from kvoffload.bench.lines import Line, line, ratios
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.transfer import Direction, TransferJob, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.layout import layout_of

if TYPE_CHECKING:
    from kvoffload.transfer.runs import Numbers

REGIONS = 8
PAGE = 64 * 2**10
SMALL_PAGE = 4 * 2**10  # where only submission is timed
STORES = 4  # times a load's bytes that are queued before it
_LOOK_S = 0.0002
_HEAD_START_S = 0.005  # in which the first stores begin


class Lanes:
    """One rank's worker side over random bytes; `count` blocks are a load, and there are six times as many."""

    def __init__(self, device: str, count_blocks: int, page: int, portal: Portal) -> None:
        self.count = count_blocks
        blocks = (STORES + 2) * count_blocks
        self._tensors = [
            torch.randint(0, 256, (blocks, page), dtype=torch.uint8, device=device) for _ in range(REGIONS)
        ]
        layout = layout_of(self._tensors)
        self.slot_bytes = layout.slot_bytes
        self.side = WorkerSide(Rank(0), 1, OffloadConfig(host_bytes=blocks * self.slot_bytes), portal)
        slots = self.side.register(layout)
        self._numbers = count()
        self._open: set[JobId] = set()
        self._draw = np.random.default_rng(0)
        ready = 0
        while ready < slots or not self.side.pump.statistics().wake_ups:  # the coroutine has started, too
            report = self.side.take_report()
            ready = ready if report is None else report.ready_slots
            time.sleep(_LOOK_S)

    def load_seconds(self, *, stores: bool) -> float:
        """Return the seconds that a load of scattered blocks takes, with or without stores queued before it."""
        order = self._draw.permutation((STORES + 2) * self.count)
        blocks, slots = self._draw.permutation(order), order
        queued = self._jobs(Direction.STORE, slots[2 * self.count :], blocks[2 * self.count :], STORES)
        if stores:
            self.side.start_stores(TransferPlan(stores=queued))
            time.sleep(_HEAD_START_S)
        (load,) = self._jobs(Direction.LOAD, slots[: self.count], blocks[: self.count], 1)
        begun = time.perf_counter()
        self.side.start_loads(TransferPlan(loads=(load,)))
        left = {load.job, *((job.job for job in queued) if stores else ())}
        self._await(left, load.job)
        seconds = time.perf_counter() - begun
        self._await(left, None)
        return seconds

    @property
    def open_jobs(self) -> int:
        """Stores of `queue_stores` that have not been reported."""
        return len(self._open)

    def queue_stores(self) -> None:
        """Queue stores of four loads' bytes, for `look` and `settle`."""
        order = self._draw.permutation((STORES + 2) * self.count)[: STORES * self.count]
        plan = TransferPlan(stores=self._jobs(Direction.STORE, order, order, STORES))
        self._open |= {job.job for job in plan.stores}
        self.side.start_stores(plan)

    def look(self) -> None:
        """Take a report, as an engine does in each step."""
        self._take(self._open)

    def settle(self) -> None:
        """Return when all of `queue_stores` has been reported."""
        self._await(self._open, None)

    def submission_seconds(self) -> float:
        """Return the seconds that the hook takes to submit a load of adjacent blocks; the load is waited for."""
        start = int(self._draw.integers(self.count))
        numbers = np.arange(start, start + self.count)
        (load,) = self._jobs(Direction.LOAD, numbers, numbers, 1)
        begun = time.perf_counter()
        self.side.start_loads(TransferPlan(loads=(load,)))
        seconds = time.perf_counter() - begun
        self._await({load.job}, None)
        return seconds

    def check(self) -> None:
        """Store blocks, load them elsewhere, and compare.

        Raises:
            WrongBytes: they differ.
        """
        order = self._draw.permutation((STORES + 2) * self.count)
        slots, source, target = order[: self.count], order[: self.count], order[self.count : 2 * self.count]
        for way, blocks in ((Direction.STORE, source), (Direction.LOAD, target)):
            plan = self._jobs(way, slots, blocks, 1)
            if way is Direction.STORE:
                self.side.start_stores(TransferPlan(stores=plan))
            else:
                self.side.start_loads(TransferPlan(loads=plan))
            self._await({plan[0].job}, None)
        if any(not torch.equal(tensor[source], tensor[target]) for tensor in self._tensors):
            raise WrongBytes("a block that was stored and loaded again differs")

    def _await(self, left: set[JobId], wanted: JobId | None) -> None:
        """Take reports until `wanted`, or where there is none all of `left`, have come."""
        while wanted in left if wanted is not None else left:
            if not self._take(left):
                time.sleep(_LOOK_S)

    def _take(self, left: set[JobId]) -> bool:
        report = self.side.take_report()
        for job in report.jobs if report is not None else ():
            if job.outcome is not CopyOutcome.DONE:
                raise WrongBytes(f"a {job.direction.value} has ended as {job.outcome.value}")
            left.discard(job.job)
        return report is not None

    def _jobs(self, way: Direction, slots: Numbers, blocks: Numbers, parts: int) -> tuple[TransferJob, ...]:
        return tuple(
            TransferJob(
                JobId(next(self._numbers)),
                way,
                tuple(map(SlotId, some.tolist())),
                tuple(map(DeviceBlockId, others.tolist())),
            )
            for some, others in zip(np.array_split(slots, parts), np.array_split(blocks, parts), strict=True)
        )


@contextmanager
def lanes(device: str, size: int, page: int) -> Iterator[Lanes]:
    """Make the worker's side for loads of about `size` bytes, and close it."""
    portal = Portal("kvoffload-bench")
    made = Lanes(device, max(size // (page * REGIONS), 1), page, portal)
    try:
        yield made
    finally:
        made.side.close()
        portal.close()


def measure_loads(device: str, size: int, repeats: int) -> Iterator[Line]:
    """Time a load alone and one behind stores, in pairs; which comes first alternates."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with lanes(device, size, PAGE) as made:
        made.check()
        for repeat in range(repeats + 1):
            for stores in (False, True) if repeat % 2 else (True, False):
                took = made.load_seconds(stores=stores)
                if repeat:  # the first warms up
                    seconds[stores].append(took)
    mib = size // 2**20
    what = f"a load of {mib} MiB while {STORES * mib} MiB of stores are queued, over the load alone"
    yield line(what, ratios(seconds[True], seconds[False]), at_most=1.2)
    yield line(f"a load of {mib} MiB alone", [1e3 * one for one in seconds[False]], " ms")


def measure_submission(device: str, size: int, repeats: int) -> Iterator[Line]:
    """Time what submitting a load of adjacent blocks takes, of the copier alone and in the hook."""
    with Rig(device, SMALL_PAGE, size) as rig:
        merged = [1e6 * rig.submit_adjacent() / rig.count for _ in range(repeats + 1)]
    with lanes(device, size, SMALL_PAGE) as made:
        made.check()
        hook = [1e6 * made.submission_seconds() / made.count for _ in range(repeats + 1)]
    what = f"submitting {rig.count:,} adjacent blocks, a block"
    yield line(f"{what}: merged and submitted", merged[1:], " us", at_most=0.05)
    yield line(f"{what}: in the hook, the job taken in", hook[1:], " us")
