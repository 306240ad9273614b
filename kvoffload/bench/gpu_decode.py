"""An engine that decodes, in place of a real one: a kernel that reads memory, as decoding reads weights and KV blocks.

A step is a few launches and the wait for their end; beside it the worker's side stores blocks, as it does for an engine.
The kernel is PTX, which the driver compiles for whatever device there is.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from kvoffload.bench.lines import Line, line, ratios
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.transfer import Direction, TransferJob, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.crossover import learn
from kvoffload.transfer.cuda_copier import CudaCopier
from kvoffload.transfer.cuda_driver import NvidiaDriver
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

if TYPE_CHECKING:
    from collections.abc import Iterator


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
"""
"""Adds up words of 16 bytes; the result serves only to keep the reads."""

_BLOCKS, _THREADS = 2048, 256
_LAYERS = 32  # launches in a step
_STEPS = 20  # of a measurement
_REGIONS = 8
_STORED = 16  # blocks in a step that stores
_SLOTS = 8 * _STORED


class Decode:
    """The stand-in: `size` bytes of weights, and KV blocks of an eighth of a step's stores each.

    Args:
        driver: the device's.
        device: its name.
        size: bytes that a launch reads, at least 64 KiB.
    """

    def __init__(self, driver: NvidiaDriver, device: str, size: int) -> None:
        self._library, self._driver, self._device = driver.library, driver, device
        self.stream = driver.stream(urgent=False)
        self._weights = driver.allocate(size, self.stream)
        self._sum = driver.allocate(4096, self.stream)
        self._words = size // 16
        self._end = driver.event(timed=False)
        self._function = self._load()
        self.page = max(min(size // (_REGIONS * _STORED), 256 << 10), 4096)

    def compute(self) -> None:
        """Enqueue a step's launches and wait for them, as an engine does for the step's tokens."""
        source, words, total = (
            ctypes.c_uint64(self._weights),
            ctypes.c_uint32(self._words),
            ctypes.c_uint64(self._sum),
        )
        parameters = (ctypes.c_void_p * 3)(*(ctypes.addressof(one) for one in (source, words, total)))
        self._driver.enter()
        launch = self._library.cuLaunchKernel
        for _ in range(_LAYERS):
            launch(self._function, _BLOCKS, 1, 1, _THREADS, 1, 1, 0, self.stream, parameters, None)

    def wait(self) -> None:
        """Return when all that was enqueued has ended; other threads run meanwhile."""
        self._driver.record(self._end, self.stream)
        self._library.cuEventSynchronize(self._end.handle)

    def step(self) -> None:
        """Compute and wait. Callable from any thread."""
        self.compute()
        self.wait()

    @contextmanager
    def storing(self) -> Iterator[Storing]:
        """Lend the worker's side that stores beside this engine."""
        portal = Portal("kvoffload-gpu-check")
        try:
            storing = Storing(self, portal)
            try:
                yield storing
            finally:
                storing.side.close()
        finally:
            portal.close()

    def layout(self) -> DeviceLayout:
        """Return memory for as many blocks as there are slots."""
        return DeviceLayout.of(
            [
                DeviceRegion(
                    self._driver.allocate(_SLOTS * self.page, self.stream),
                    self.page,
                    self.page,
                    _SLOTS,
                    self._device,
                )
                for _ in range(_REGIONS)
            ]
        )

    def copier(self) -> CudaCopier:
        """Return a copier as an engine on this device would get it."""
        copier = CudaCopier(NvidiaDriver(self._device, lambda: self.stream))
        learn(copier, self._device)
        return copier

    def _load(self) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._library.cuModuleLoadData(ctypes.byref(module), PTX)
        self._library.cuModuleGetFunction(ctypes.byref(function), module, b"kvoffload_scan")
        assert function.value is not None
        return function.value


class Storing:
    """The worker's side beside a `Decode`, driven by hooks in vLLM's order."""

    def __init__(self, decode: Decode, portal: Portal) -> None:
        self._decode = decode
        layout = decode.layout()
        config = OffloadConfig(host_bytes=_SLOTS * layout.slot_bytes)
        self.side = WorkerSide(Rank(0), 1, config, portal, copier=decode.copier())
        self.side.register(layout)
        self._slot_bytes = layout.slot_bytes
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

    def _step(self, *, stores: bool) -> None:
        plan = self._stores() if stores else TransferPlan()
        self.side.begin_step(plan)
        self._decode.compute()
        self.side.start_stores(plan)
        self._decode.wait()
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
        return TransferPlan(
            stores=(TransferJob(JobId(number), Direction.STORE, tuple(slots), tuple(blocks)),)
        )

    def _take(self) -> None:
        report = self.side.take_report()
        if report is None:
            return
        self._ready = report.ready_slots
        for job in report.jobs:
            self._open.discard(job.job)
            self.stored_bytes += job.copied_bytes


def measure_decoding(decode: Decode, repeats: int) -> Iterator[Line]:
    """Time steps with stores beside them and without, in pairs."""
    found: dict[bool, list[float]] = {True: [], False: []}
    with decode.storing() as storing:
        for repeat in range(repeats + 1):
            for stores in (False, True) if repeat % 2 else (True, False):
                seconds = storing.seconds(stores=stores)
                if repeat:  # the first warms up
                    found[stores].append(seconds)
    what = "a decoding step, stand-in engine (a kernel that reads memory)"
    yield line(f"{what}: with stores, over without", ratios(found[True], found[False]), at_most=1.02)
    yield line(f"{what}: without stores", [1e3 * one / _STEPS for one in found[False]], " ms")
    stored = storing.stored_bytes / (repeats + 1) / (sum(found[True]) / repeats) / 1e9
    yield line(f"{what}: stored meanwhile", [stored], " GB/s")
