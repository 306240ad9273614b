from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import DeviceBlockId, Rank, SlotId
from kvoffload.model.wire import Direction, TransferPlan
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.testing import FakeClock
from kvoffload.transfer import factory
from tests.copy_jobs import device_job
from tests.cuda_emulator import Emulator, Engine
from tests.runtime.manual_portal import ManualPortal

BLOCKS, PAGE = 100_000, 64
HOOK_CALLS = 20  # the maximum number of driver calls that one hook may make


class LargeLoad:
    """A worker's side whose blocks are all on the host, and a step that loads them into scattered blocks."""

    def __init__(self, emulator: Emulator, patch: pytest.MonkeyPatch) -> None:
        self.emulator = emulator
        self.engine = Engine(emulator, blocks=BLOCKS, pages=(PAGE,))
        self.portal = ManualPortal(FakeClock())
        patch.setattr(factory, "current_stream", lambda device: lambda: self.engine.stream)
        config = OffloadConfig(host_bytes=BLOCKS * self.engine.layout.slot_bytes)
        self.side = WorkerSide(Rank(0), 1, config, self.portal, clock=self.portal.clock)
        self.side.register(self.engine.layout)
        self.order = np.random.default_rng(1).permutation(BLOCKS)
        slots, blocks = map(SlotId, range(BLOCKS)), map(DeviceBlockId, self.order.tolist())
        self.plan = TransferPlan(loads=(device_job(1, Direction.LOAD, slots, blocks),))

    def fill_host(self) -> np.ndarray:
        (chunk,) = self.side.pump._arena._chunks
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * (BLOCKS * PAGE)).from_address(chunk.address))
        memory[:] = np.random.default_rng(2).integers(0, 256, len(memory), np.uint8)
        return memory.reshape(BLOCKS, PAGE).copy()

    def on_device(self) -> np.ndarray:
        found = np.zeros((BLOCKS, PAGE), np.uint8)
        address = self.engine.layout.regions[0].address
        assert self.emulator.lib.emu_peek(address, found.ctypes.data, found.size)
        return found

    def outcomes(self) -> list[CopyOutcome]:
        report = self.side.take_report()
        return [job.outcome for job in report.jobs] if report is not None else []


@pytest.mark.parametrize("coroutine_lives", [True, False])
def test_a_hooks_calls_into_the_driver_do_not_grow_with_a_load(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, coroutine_lives: bool
) -> None:
    load = LargeLoad(emulator, monkeypatch)
    bytes_of_slots = load.fill_host()
    load.portal.is_dead = not coroutine_lives
    load.outcomes()
    found: list[CopyOutcome] = []
    before = emulator.calls()
    load.side.begin_step(load.plan)
    load.side.start_loads(load.plan)
    assert emulator.calls() - before <= HOOK_CALLS
    with ThreadPoolExecutor(1) as coroutine:
        while not found:
            before = emulator.calls()
            found = load.outcomes()
            assert emulator.calls() - before <= HOOK_CALLS
            if coroutine_lives:
                coroutine.submit(load.portal.advance).result()
            emulator.step(10_000)
    assert found == [CopyOutcome.DONE]
    assert emulator.calls("cuMemcpyBatchAsync") == 196
    assert np.array_equal(load.on_device()[load.order], bytes_of_slots)
    load.side.close()
    load.portal.close()
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report
