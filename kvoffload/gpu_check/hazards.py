"""Checks that may hang or crash. Each check runs in a separate process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from kvoffload.gpu_check.latencies import repeated
from kvoffload.gpu_check.parts import Line, NotHere, Options, asked, in_words, measured
from kvoffload.gpu_check.rig import Rig, code_of
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId
from kvoffload.model.wire import CopyJob, DeviceJob, Direction, Tier, TransferPlan
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.cuda import driver as driver_module
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.cuda.library import RELAXED
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

PTX = Path(__file__).with_name("pause.ptx")
_GLOBAL = 0
_UNHARMED = "0 0 0"
# Worker threads may make these calls at any time, so the calls must not break a capture.
_JUDGED = ("register", "query", "record", "wait", "copy", "batch")
_TIMEOUT_S = 10.0
_GATE_S = 0.4
_WAITED_S = 0.02  # seconds after which a call counts as blocked
_COPIES = 8192
_EXIT_S = 50
_STORED = 16  # the number of blocks to store
# The size of a copy in bytes. It is larger than the 20 MiB pieces in which torch maps expandable segments.
_PIECE_ACROSS = 24 << 20


def captures(options: Options) -> Iterator[Line]:
    """Check which driver calls another thread can make while the calling thread captures a graph in "global" mode.

    Each driver call is made during a separate capture.
    """
    rig = Rig(replace(options, size=min(options.size, 16 << 20)))
    driver = rig.driver
    other = driver.stream(urgent=True)
    memory = rig.host_memory(1 << 20)
    runs = rig.runs(Direction.LOAD, 4096, 16)
    one = [int(column[0]) for column in (runs.target, runs.source, runs.size)]
    place = ctypes.c_uint64()
    calls: dict[str, Callable[[], object]] = {
        "register": lambda: driver.register(memory.address, memory.size),
        "unregister": lambda: driver.unregister(memory.address),
        "query": lambda: driver.has_passed(rig.event),
        "record": lambda: driver.record(rig.event, other),
        "wait": lambda: driver.wait(other, rig.event),
        "copy": lambda: driver.library.cuMemcpyAsync(*one, other),
        "batch": lambda: driver.copy(Direction.LOAD, runs, other),
        "allocate": lambda: driver.library.cuMemAllocAsync(ctypes.byref(place), 4096, other),
        "make an event": lambda: driver.library.cuEventCreate(ctypes.byref(ctypes.c_void_p()), 2),
    }
    for name, call in calls.items():
        codes = _captured(rig, call)
        what = f"codes of a capture's begin, {name} on a relaxed thread, the capture's end"
        yield in_words(what, codes, _UNHARMED) if name in _JUDGED else Line(what, words=codes)


def _captured(rig: Rig, call: Callable[[], object]) -> str:
    """Begin a capture, make `call` on another thread, and end the capture.

    Return the error code of each step.
    """
    library = rig.driver.library
    graph = ctypes.c_void_p()
    found: list[object] = ["none"]  # if the call hangs, its code stays "none"

    def make_call() -> None:
        rig.driver.enter()
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
        found[0] = code_of(call)

    begin = code_of(partial(library.cuStreamBeginCapture_v2, rig.stream, _GLOBAL))
    thread = threading.Thread(target=make_call, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    end = code_of(partial(library.cuStreamEndCapture, rig.stream, ctypes.byref(graph)))
    return f"{begin} {found[0]} {end}"


def depth(options: Options) -> Iterator[Line]:
    """Enqueue copies behind a busy stream. Find the first call that blocks, and whether it holds up other threads."""
    for batch_copies, copies in (("off", 1), ("on", 16), ("on", 256), ("on", 512)):
        how = f"in batches of {copies}" if copies > 1 else "one by one"
        what = f"copies {how} behind a busy stream"
        yield from asked(what, _depth(options, batch_copies, copies, what))
    yield Line(
        "limits that kvoffload assumes",
        words=f"room for {driver_module._ROOM} pending operations, slices of {driver_module._SLICE} copies",
    )


def _depth(options: Options, batch_copies: str, copies: int, what: str) -> Iterator[Line]:
    rig = Rig(replace(options, size=min(options.size, 64 << 20)), batch_copies=batch_copies)
    driver = rig.driver
    busy = driver.stream(urgent=False)
    runs = rig.runs(Direction.STORE, 8192, copies)
    enqueued = first = 0
    pause(driver, busy, _GATE_S)
    beats = [time.perf_counter()]
    driver.record(rig.event, busy)
    driver.wait(rig.stream, rig.event)
    with repeated(lambda: beats.append(time.perf_counter())):
        while not first and enqueued < _COPIES and not driver.has_passed(rig.event):
            begun = time.perf_counter()
            driver.copy(Direction.STORE, runs, rig.stream)
            enqueued += copies
            if time.perf_counter() - begun > _WAITED_S:
                first = enqueued
    rig.settle(rig.stream)
    words = f"the call that made them {first:,}" if first else f"none of {enqueued:,}"
    yield Line(f"{what}, the first call that waits", words=words)
    longest = 1e3 * float(np.diff(beats).max())
    yield measured(f"{what}, longest wait of another thread", [longest], " ms", at_most=1e3 * _WAITED_S)


def pause(driver: NvidiaDriver, stream: int, seconds: float) -> None:
    """Keep a stream busy for `seconds` with a PTX kernel. The driver compiles the kernel for the device."""
    module = ctypes.c_void_p()
    function = ctypes.c_void_p()
    nanoseconds = ctypes.c_uint64(int(1e9 * seconds))
    driver.enter()
    driver.library.cuModuleLoadData(ctypes.byref(module), PTX.read_bytes())
    driver.library.cuModuleGetFunction(ctypes.byref(function), module, b"kvoffload_pause")
    places = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
    driver.library.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, places, None)


def exits(options: Options) -> Iterator[Line]:
    """Yield the exit codes of processes that end while memory is pinned, threads are alive and copies are running."""
    for how in ("closes", "only ends"):
        code = f"from kvoffload.gpu_check.hazards import leave; leave({options.device!r}, {options.size}, {how == 'closes'})"
        ended = subprocess.run([sys.executable, "-c", code], timeout=_EXIT_S, check=False)
        what = f"exit code of a worker that {how} with copies under way"
        yield in_words(what, str(ended.returncode), "0")


def leave(device: str, size: int, closes: bool) -> None:
    """Start stores behind a busy stream, and return while their copies are running.

    If `closes` is true, the worker is closed before this function returns.
    """
    rig = Rig(Options(device, size, 1, 1))
    portal = Portal("kvoffload-gpu-check")
    page = rig.size // _STORED
    layout = DeviceLayout.of([DeviceRegion(rig.memory, page, page, _STORED, device)])
    config = OffloadConfig(host_bytes=_STORED * layout.slot_bytes)
    side = WorkerSide(Rank(0), 1, config, portal, copier=rig.copier)
    side.register(layout)
    while (report := side.take_report()) is None or report.ready_slots < _STORED:
        side.begin_step(TransferPlan())
        side.start_stores(TransferPlan())
    slots, blocks = map(SlotId, range(_STORED)), map(DeviceBlockId, range(_STORED))
    job: DeviceJob = CopyJob(JobId(0), Direction.STORE, Tier.HOST, tuple(slots), tuple(blocks), None)
    plan = TransferPlan(stores=(job,))
    side.begin_step(plan)
    pause(rig.driver, rig.stream, _GATE_S)
    side.start_stores(plan)
    if closes:
        side.close()
        portal.close()


def segments(options: Options) -> Iterator[Line]:
    """Copy memory that spans several pieces of one of torch's expandable segments, in batches and one by one.

    Raises:
        NotHere: torch is missing, or sees no GPU.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ[name] = "expandable_segments:True"
    try:
        import torch
    except ImportError as error:
        raise NotHere("torch is not installed") from error
    if not torch.cuda.is_available():
        raise NotHere("torch sees no GPU")
    memory = torch.zeros(2 * options.size, dtype=torch.uint8, device=options.device)
    torch.cuda.synchronize()
    piece = min(_PIECE_ACROSS, options.size)
    for how, batch_copies in (("in batches", "on"), ("one by one", "off")):
        rig = Rig(options, batch_copies=batch_copies, memory=memory.data_ptr())
        what = f"wrong bytes across the pieces of an expandable segment, {how}"
        yield measured(what, [rig.wrong_bytes(piece)], at_most=0)
