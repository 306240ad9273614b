"""An engine that decodes, in place of a real one: a kernel that reads memory, as decoding reads weights and KV blocks.

A step is a few launches and the wait for their end; beside it the worker's side stores blocks, as it does for an engine.
The kernels are in `decode.ptx`, which the driver compiles for whatever device there is.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from statistics import mean

from kvoffload.gpu_check.parts import Line, Options, measured, ratios
from kvoffload.gpu_check.rig import Rig
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.wire import CopyJob, DeviceJob, Direction, Tier, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

PTX = Path(__file__).with_suffix(".ptx")
_BLOCKS, _THREADS = 2048, 256
_LAYERS = 32  # launches in a step
_STEPS = 20  # of a measurement
_REGIONS = 8
_STORED = 16  # blocks in a step that stores
_SLOTS = 8 * _STORED
_LONG, _SHORT = 256 << 10, 8 << 10  # bytes of a block in one region


class Kernels:
    """The kernels of `PTX`, loaded on one device.

    Raises:
        CopyError: the driver refuses them.
    """

    def __init__(self, driver: NvidiaDriver) -> None:
        self._driver = driver
        self._launch = driver.library.cuLaunchKernel
        module = ctypes.c_void_p()
        driver.enter()
        driver.library.cuModuleLoadData(ctypes.byref(module), PTX.read_bytes())
        self._functions = {}
        for name in ("kvoffload_scan", "kvoffload_pause"):
            function = ctypes.c_void_p()
            driver.library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            self._functions[name] = function

    def scan(self, stream: int, source: int, size: int, result: int) -> None:
        """Read `size` bytes of device memory."""
        words = ctypes.c_uint64(source), ctypes.c_uint32(size // 16), ctypes.c_uint64(result)
        self._enqueue("kvoffload_scan", stream, _BLOCKS, _THREADS, *words)

    def pause(self, stream: int, seconds: float) -> None:
        """Keep a stream busy for so long."""
        self._enqueue("kvoffload_pause", stream, 1, 1, ctypes.c_uint64(int(1e9 * seconds)))

    def _enqueue(
        self, name: str, stream: int, blocks: int, threads: int, *words: ctypes._SimpleCData[int]
    ) -> None:
        places = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
        self._driver.enter()
        self._launch(self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, places, None)


class Decode:
    """The stand-in on a rig's first half of device memory, and the worker's side that stores beside it.

    Args:
        rig: its copier stores.
        page: bytes of a block in one region.
    """

    def __init__(self, rig: Rig, page: int) -> None:
        self._rig = rig
        self._portal = Portal("kvoffload-gpu-check")
        self._kernels = Kernels(rig.driver)
        self._end = rig.driver.event(timed=False)
        page = min(page, rig.size // (_REGIONS * _SLOTS))
        first = rig.memory + rig.size
        layout = DeviceLayout.of(
            DeviceRegion(first + number * _SLOTS * page, page, page, _SLOTS, rig.device)
            for number in range(_REGIONS)
        )
        config = OffloadConfig(host_bytes=_SLOTS * layout.slot_bytes)
        self._side = WorkerSide(Rank(0), 1, config, self._portal, copier=rig.copier)
        self._side.register(layout)
        self._ready = 0
        self._open: set[int] = set()
        self._numbers = count()
        self.stored_bytes = 0

    def seconds(self, *, stores: bool) -> float:
        """Return the seconds of some steps."""
        begun = time.perf_counter()
        for _ in range(_STEPS):
            self._step(stores=stores)
        seconds = time.perf_counter() - begun
        while self._open:  # the next measurement begins with nothing under way
            self._take()
            time.sleep(1e-3)
        return seconds

    def store_behind(self, seconds: float) -> None:
        """Begin stores behind a stream that is busy for so long."""
        plan = self._stores()
        self._side.begin_step(plan)
        self._kernels.pause(self._rig.stream, seconds)
        self._side.start_stores(plan)

    def close(self) -> None:
        """End the worker's side."""
        self._side.close()
        self._portal.close()

    def _step(self, *, stores: bool) -> None:
        """Compute and wait, as an engine does for the step's tokens; the hooks are called in vLLM's order."""
        rig = self._rig
        plan = self._stores() if stores else TransferPlan()
        self._side.begin_step(plan)
        for _ in range(_LAYERS):
            self._kernels.scan(rig.stream, rig.memory, rig.size - 4096, rig.memory + rig.size - 4096)
        self._side.start_stores(plan)
        rig.driver.record(self._end, rig.stream)
        rig.driver.library.cuEventSynchronize(self._end.handle)
        self._take()

    def _stores(self) -> TransferPlan:
        """Return a step's stores; none while those that had the same slots are under way."""
        number = next(self._numbers)
        first = number * _STORED % _SLOTS
        if first + _STORED > self._ready or any(one * _STORED % _SLOTS == first for one in self._open):
            return TransferPlan()
        numbers = range(first, first + _STORED)
        self._open.add(number)
        slots, blocks = map(SlotId, numbers), map(DeviceBlockId, numbers)
        job: DeviceJob = CopyJob(JobId(number), Direction.STORE, Tier.HOST, tuple(slots), tuple(blocks), None)
        return TransferPlan(stores=(job,))

    def _take(self) -> None:
        report = self._side.take_report()
        if report is None:
            return
        self._ready = report.ready_slots
        for job in report.jobs:
            self._open.discard(job.job)
            self.stored_bytes += job.copied_bytes


def measure_steps(rig: Rig, page: int) -> tuple[list[float], list[float], float]:
    """Time a step with stores beside it and without, in pairs.

    Returns:
        The seconds of steps with stores, those of steps without, and the GB/s stored meanwhile.
    """
    found: dict[bool, list[float]] = {True: [], False: []}
    with closing(Decode(rig, page)) as decode:
        for repeat in range(rig.repeats + 1):
            for stores in (False, True) if repeat % 2 else (True, False):
                seconds = decode.seconds(stores=stores) / _STEPS
                if repeat:  # the first warms up
                    found[stores].append(seconds)
    in_a_step = decode.stored_bytes / (rig.repeats + 1) / _STEPS
    return found[True], found[False], in_a_step / mean(found[True]) / 1e9


def steps(options: Options) -> Iterator[Line]:
    """Yield what stores cost a decoding engine."""
    for page in (_LONG, _SHORT):
        beside, alone, stored = measure_steps(Rig(options), page)
        what = f"a step of a stand-in engine, stores of {page >> 10} KiB by the copy engine"
        yield measured(f"{what}, over one without", ratios(beside, alone), "x", at_most=1.02)
        yield measured(f"{what}: a step without", [1e3 * one for one in alone], " ms")
        yield measured(f"{what}: stored meanwhile", [stored], " GB/s")
