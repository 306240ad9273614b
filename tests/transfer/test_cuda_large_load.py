from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Direction, TransferPlan
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.testing import FakeClock
from kvoffload.transfer import factory
from tests.copy_jobs import device_job
from tests.cuda_emulator import Emulator, Engine
from tests.runtime.manual_portal import ManualPortal

BLOCKS, PAGE = 100_000, 64
HOOK_CALLS = 20  # the maximum number of driver calls that one hook may make


@pytest.mark.parametrize("coroutine_lives", [True, False])
def test_a_hooks_calls_into_the_driver_do_not_grow_with_a_load(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, coroutine_lives: bool
) -> None:
    engine = Engine(emulator, blocks=BLOCKS, pages=(PAGE,))
    portal = ManualPortal(FakeClock())
    monkeypatch.setattr(factory, "current_stream", lambda device: lambda: engine.stream)
    config = OffloadConfig(host_bytes=BLOCKS * engine.layout.slot_bytes)
    side = WorkerSide(Rank(0), 1, config, portal, clock=portal.clock)
    side.register(engine.layout)
    portal.is_dead = not coroutine_lives

    (chunk,) = side.pump._arena._chunks
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * (BLOCKS * PAGE)).from_address(chunk.address))
    memory[:] = np.random.default_rng(2).integers(0, 256, len(memory), np.uint8)
    on_host = memory.reshape(BLOCKS, PAGE).copy()
    order = np.random.default_rng(1).permutation(BLOCKS)
    plan = TransferPlan(loads=(device_job(1, Direction.LOAD, range(BLOCKS), order.tolist()),))

    def outcomes() -> list[CopyOutcome]:
        report = side.take_report()
        return [job.outcome for job in report.jobs] if report is not None else []

    found = outcomes()
    before = emulator.calls()
    side.begin_step(plan)
    side.start_loads(plan)
    assert emulator.calls() - before <= HOOK_CALLS
    with ThreadPoolExecutor(1) as coroutine:
        while not found:
            before = emulator.calls()
            found = outcomes()
            assert emulator.calls() - before <= HOOK_CALLS
            if coroutine_lives:
                coroutine.submit(portal.advance).result()
            emulator.step(10_000)
    assert found == [CopyOutcome.DONE]
    assert emulator.calls("cuMemcpyBatchAsync") == 196
    on_device = np.zeros((BLOCKS, PAGE), np.uint8)
    address = engine.layout.regions[0].address
    assert emulator.lib.emu_peek(address, on_device.ctypes.data, on_device.size)
    assert np.array_equal(on_device[order], on_host)
    side.close()
    portal.close()
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report
