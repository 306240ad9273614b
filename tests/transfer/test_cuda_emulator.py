from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.runs import CopyRuns
from tests.cuda_emulator import CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, RELAXED, Emulator, Engine

INVALIDATED = 901


def beside(engine: Engine, act: Callable[[], int], mode: int = CAPTURE_GLOBAL) -> int:
    """Call the driver on another thread, in the engine's context."""

    def run() -> int:
        engine.enter()
        engine._lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(mode)))
        return act()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def registers(emulator: Emulator) -> Callable[[], int]:
    memory = np.zeros(4096, np.uint8)
    return lambda: int(emulator.lib.cuMemHostRegister_v2(memory.ctypes.data, 4096, 0))


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, RELAXED])
def test_an_unsafe_call_breaks_a_capture_depending_on_its_thread_and_mode(
    emulator: Emulator, mode: int, is_own: bool
) -> None:
    engine, call = Engine(emulator), registers(emulator)
    engine.capture(mode if is_own else CAPTURE_GLOBAL)
    spoils = mode == CAPTURE_GLOBAL or (is_own and mode == CAPTURE_THREAD_LOCAL)
    assert (call() if is_own else beside(engine, call, mode)) == (900 if spoils else 0)
    assert engine.end_capture() == (INVALIDATED if spoils else 0)


def test_a_synchronizing_call_breaks_captures_in_every_mode_on_its_own_device_only(
    emulator: Emulator,
) -> None:
    engines = [Engine(emulator, device) for device in (0, 1)]
    for engine in engines:
        engine.capture(RELAXED)
    assert beside(engines[1], emulator.lib.cuCtxSynchronize, RELAXED) == 900
    assert [engine.end_capture() for engine in engines] == [0, INVALIDATED]


@pytest.mark.parametrize("waits", [True, False])
def test_using_memory_on_another_stream_before_its_allocation_is_reported(
    emulator: Emulator, waits: bool
) -> None:
    Engine(emulator)
    driver = NvidiaDriver("cuda:0")
    host, first, second = driver.pinned(4096), driver.stream(urgent=True), driver.stream(urgent=False)
    address = driver.allocate(4096, first)
    if waits:
        event = driver.event(timed=False)
        driver.record(event, first)
        driver.wait(second, event)
    runs = CopyRuns(*(np.array([number], np.int64) for number in (host.ctypes.data, address, 4096)))
    driver.copy(Direction.LOAD, runs, second)
    emulator.step()
    assert bool(emulator.races) is not waits


def test_calls_that_would_wait_with_the_gil_are_counted(emulator: Emulator) -> None:
    engine = Engine(emulator)
    emulator.set_depth(2)
    held = ctypes.PyDLL("libcuda.so.1").cuEventRecord
    event, stream = NvidiaDriver("cuda:0").event(timed=False), ctypes.c_void_p(engine.stream)
    for _ in range(4):
        held(ctypes.c_void_p(event.handle), stream)
    assert (emulator.waits, emulator.waits_with_lock) == (2, 2)
