from __future__ import annotations

import os
from collections import Counter
from functools import partial
from mmap import mmap

import numpy as np
import pytest

from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda.copier import CudaCopier, CudaTicket
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.runs import CopyRuns
from tests.cuda_emulator import Emulator, Engine, build
from tests.simulate.campaign import play
from tests.simulate.emulated import simulate_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(build())


@pytest.mark.parametrize("seeds", [30, pytest.param(200, marks=pytest.mark.full)])
def test_seeds_pass_and_cover_every_kind_of_event(emulator: Emulator, seeds: int) -> None:
    total = Counter[str]()
    for seed in range(seeds):
        result = play(seed, partial(simulate_on, emulator))
        assert result.problem is None, f"seed {seed}\n{result.trace}\n{emulator.report}"
        total += result.numbers
    if seeds == 200:
        assert min(total.pop("states"), total.pop("boundaries")) > 10
        assert min(total.values()) > seeds
    assert emulator.calls("cuMemcpyBatchAsync") > 0


def test_a_seed_repeats(emulator: Emulator) -> None:
    found = []
    for _ in range(2):
        result = play(9, partial(simulate_on, emulator))
        found.append((result, emulator.executed))
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_one_of_the_first_seeds_detects_batches_without_an_end_event(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaTicket, "end", lambda self: setattr(self, "_has_end", True))
    child = os.fork()  # without end events, copies reach freed memory, which may crash the process
    if child == 0:
        os._exit(any(play(seed, partial(simulate_on, emulator)).problem for seed in range(40)))
    assert os.waitpid(child, 0)[1] != 0


def test_a_copy_that_reaches_freed_memory_is_reported_without_a_crash(emulator: Emulator) -> None:
    emulator.reset(stepped=True)
    emulator.accept_pageable()
    engine, memory = Engine(emulator, 0, blocks=1), mmap(-1, 4096)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    source, target, size = (np.array([value], np.int64) for value in (start, start + 64, 64))
    copier = CudaCopier(NvidiaDriver("cuda:0", lambda: engine.stream))
    copier.submit(Direction.STORE, CopyRuns(source, target, size), [copier.fence()])
    memory.close()
    emulator.step()
    assert emulator.faults == 1
