"""Runs thousands of copies while torch's kernels, streams and graphs run, and checks every byte.

Run this file with `pytest -m gpu tests/gpu`. Without a GPU the tests run on the CPU, where they test only the
simulated engine itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import Rank
from kvoffload.model.wire import TransferPlan
from kvoffload.runtime import worker_side
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.cuda import crossover
from kvoffload.transfer.cuda.driver import NvidiaDriver
from tests.cuda_emulator.life import Steps
from tests.gpu.engine import TorchEngine

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:TRITON_")]

GPU = os.environ.get("KVOFFLOAD_GPU", "cuda:0")
DEVICES = ["cpu", pytest.param(GPU, marks=pytest.mark.gpu)]
BLOCKS = {"cpu": 64, "cuda": 512}
STEPS = {"cpu": 60, "cuda": 2000}
LONG_GIB = 16


class Life(Steps):
    def let_all_run(self) -> None:
        os.sched_yield()


@contextmanager
def rank(
    device: str,
    *,
    page: int = 8192,
    whole_blocks: bool = False,
    own_stream: bool = True,
    batch_copies: str = "auto",
    host_bytes: int = 0,
) -> Iterator[tuple[TorchEngine, Life]]:
    kind = device.partition(":")[0]
    blocks = BLOCKS[kind]
    engine = TorchEngine(device, blocks, page, whole_blocks=whole_blocks, own_stream=own_stream)
    portal = Portal("kvoffload-life")
    host_bytes = host_bytes or 2 * blocks * engine.layout.slot_bytes
    side = WorkerSide(Rank(0), 1, OffloadConfig(host_bytes=host_bytes, batch_copies=batch_copies), portal)
    with engine.on_stream():
        try:
            side.register(engine.layout)
            steps = Life(engine, side, seed=1, blocks=blocks, slots=2 * blocks, most=blocks // 16)
            side.begin_step(TransferPlan())
            while side.pump._arena.ready_slots < steps.slots:
                os.sched_yield()
            yield engine, steps
        finally:
            side.close()
            portal.close()


def play(engine: TorchEngine, steps: Life, device: str) -> None:
    """Take at least so many steps, and until so many jobs were made: while earlier jobs run, a step may make none."""
    least = STEPS[device.partition(":")[0]]
    taken = 0
    while taken < least or steps.jobs <= least:
        steps.step()
        taken += 1
    steps.settle()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"own_stream": False},
        {"page": 64 << 10, "batch_copies": "off"},
        {"page": 16 << 10, "whole_blocks": True},
    ],
    ids=["layers", "default stream", "one by one", "blocks"],
)
def test_no_job_copies_a_wrong_byte(device: str, options: dict) -> None:
    with rank(device, **options) as (engine, steps):
        play(engine, steps, device)
        assert (engine.wrong, steps.failed) == (0, [])


@pytest.mark.gpu
def test_without_the_page_kernel_no_job_copies_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "learn", lambda copier, device: None)
    with rank(GPU) as (engine, steps):
        play(engine, steps, GPU)
        assert (engine.wrong, steps.failed) == (0, [])


@pytest.mark.gpu
def test_graphs_are_captured_while_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    # Do not wait for pinned memory when the engine starts.
    monkeypatch.setattr(worker_side, "_PINNING_S", 0.0)
    with rank(GPU, host_bytes=LONG_GIB << 30) as (engine, steps):
        arena = steps.side.pump._arena
        engine.enter()  # torch creates its handles here, because it cannot create them during a capture
        captures = 0
        while arena.is_growing:
            engine.capture()
            captures += 1
        assert (arena.refusal, captures > 0) == (None, True)
        play(engine, steps, GPU)
        assert (engine.wrong, steps.failed) == (0, [])


@pytest.mark.gpu
def test_missing_fences_cause_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvidiaDriver, "wait", lambda *_: None)
    with rank(GPU) as (engine, steps):
        play(engine, steps, GPU)
        assert engine.wrong


def test_a_wrong_byte_is_noticed() -> None:
    with rank("cpu") as (engine, _):
        engine.write(3, 7)
        engine.read(3, 7)
        assert engine.wrong == 0
        engine.read(3, 8)
        engine.read(4, 7)
        assert engine.wrong == 2
