"""An engine that decodes, in place of a real one: a kernel that reads memory, as decoding reads weights and KV blocks.

A step is a few launches and the wait for their end; beside it the worker's side stores blocks, as it does for an engine.
The kernels are PTX, which the driver compiles for whatever device there is.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from kvoffload.gpu_check.parts import Line, Options, measured, ratios
from kvoffload.gpu_check.rig import Rig
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.transfer import CopyJob, DeviceJob, Direction, Tier, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

PTX = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry kvoffload_scan(.param .u64 source, .param .u32 words, .param .u64 sum)
{
    .reg .pred %end;
    .reg .b32 %block, %size, %thread, %at, %step, %words, %a, %b, %c, %d, %total;
    .reg .b64 %source, %sum, %offset, %place;
    ld.param.u64 %source, [source];
    ld.param.u32 %words, [words];
    ld.param.u64 %sum, [sum];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %at, %block, %size, %thread;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %size;
    mov.u32 %total, 0;
NEXT:
    setp.ge.u32 %end, %at, %words;
    @%end bra DONE;
    mul.wide.u32 %offset, %at, 16;
    add.u64 %place, %source, %offset;
    ld.global.v4.u32 {%a, %b, %c, %d}, [%place];
    add.u32 %total, %total, %a;
    xor.b32 %total, %total, %b;
    add.u32 %total, %total, %c;
    xor.b32 %total, %total, %d;
    add.u32 %at, %at, %step;
    bra NEXT;
DONE:
    st.global.u32 [%sum], %total;
    ret;
}
.visible .entry kvoffload_pause(.param .u64 nanoseconds)
{
    .reg .pred %early;
    .reg .b64 %now, %end, %nanoseconds;
    ld.param.u64 %nanoseconds, [nanoseconds];
    mov.u64 %now, %globaltimer;
    add.u64 %end, %now, %nanoseconds;
AGAIN:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra AGAIN;
    ret;
}
"""
"""`kvoffload_scan` adds up words of 16 bytes; the result serves only to keep the reads. `kvoffload_pause` waits."""

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
        driver.library.cuModuleLoadData(ctypes.byref(module), PTX)
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
        portal: of the worker's side.
    """

    def __init__(self, rig: Rig, page: int, portal: Portal) -> None:
        self._rig = rig
        self._kernels = Kernels(rig.driver)
        self._end = rig.driver.event(timed=False)
        page = min(page, rig.size // (_REGIONS * _SLOTS))
        first = rig.memory + rig.size
        self.layout = DeviceLayout.of(
            DeviceRegion(first + number * _SLOTS * page, page, page, _SLOTS, rig.device)
            for number in range(_REGIONS)
        )
        config = OffloadConfig(host_bytes=_SLOTS * self.layout.slot_bytes)
        self.side = WorkerSide(Rank(0), 1, config, portal, copier=rig.copier)
        self.side.register(self.layout)
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
        self.side.begin_step(plan)
        self._kernels.pause(self._rig.stream, seconds)
        self.side.start_stores(plan)

    def _step(self, *, stores: bool) -> None:
        """Compute and wait, as an engine does for the step's tokens; the hooks are called in vLLM's order."""
        rig = self._rig
        plan = self._stores() if stores else TransferPlan()
        self.side.begin_step(plan)
        for _ in range(_LAYERS):
            self._kernels.scan(rig.stream, rig.memory, rig.size - 4096, rig.memory + rig.size - 4096)
        self.side.start_stores(plan)
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
        report = self.side.take_report()
        if report is None:
            return
        self._ready = report.ready_slots
        for job in report.jobs:
            self._open.discard(job.job)
            self.stored_bytes += job.copied_bytes


class Steps(NamedTuple):
    """What stores cost a decoding engine.

    Args:
        over: the time of a step with stores over that of one without, for each repeat.
        plain_ms: milliseconds of a step without.
        stored: GB/s meanwhile.
    """

    over: list[float]
    plain_ms: list[float]
    stored: float


def measure_steps(rig: Rig, page: int) -> Steps:
    """Time steps with stores beside them and without, in pairs."""
    found: dict[bool, list[float]] = {True: [], False: []}
    portal = Portal("kvoffload-gpu-check")
    decode = Decode(rig, page, portal)
    try:
        for repeat in range(rig.repeats + 1):
            for stores in (False, True) if repeat % 2 else (True, False):
                seconds = decode.seconds(stores=stores)
                if repeat:  # the first warms up
                    found[stores].append(seconds)
    finally:
        decode.side.close()
        portal.close()
    stored = decode.stored_bytes / (rig.repeats + 1) / (sum(found[True]) / rig.repeats) / 1e9
    return Steps(ratios(found[True], found[False]), [1e3 * one / _STEPS for one in found[False]], stored)


def steps(options: Options) -> Iterator[Line]:
    """Yield what stores cost a decoding engine."""
    for page in (_LONG, _SHORT):
        found = measure_steps(Rig(options), page)
        what = f"a step of a stand-in engine, stores of {page >> 10} KiB by the copy engine"
        yield measured(f"{what}, over one without", found.over, "x", at_most=1.02)
        yield measured(f"{what}: a step without", found.plain_ms, " ms")
        yield measured(f"{what}: stored meanwhile", [found.stored], " GB/s")
