"""Runs the page kernel with Triton's compiler and launcher on the emulated driver: `python -m ... LIBRARY`.

The process must not import torch: Triton would ask torch for devices, and CPU builds of torch have none.
"""

from __future__ import annotations

import importlib.abc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class _NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torch":
            raise ImportError(name)


sys.meta_path.insert(0, _NoTorch())

import numpy as np  # noqa: E402

from kvoffload.gpu_check import copies  # noqa: E402
from kvoffload.gpu_check.parts import Options  # noqa: E402
from kvoffload.model.wire import Direction  # noqa: E402
from kvoffload.transfer.cuda import crossover  # noqa: E402
from kvoffload.transfer.cuda.copier import CudaCopier, GpuProfile, read_profile  # noqa: E402
from kvoffload.transfer.cuda.crossover import learn  # noqa: E402
from kvoffload.transfer.cuda.driver import NvidiaDriver  # noqa: E402
from kvoffload.transfer.ports import TicketState  # noqa: E402
from kvoffload.transfer.runs import CopyRuns  # noqa: E402
from tests.captured_logs import capture_logs  # noqa: E402
from tests.cuda_emulator import Emulator, Engine  # noqa: E402

PIECES, PIECE = 64, 4096
SUBMISSIONS = 40
ALLOCATIONS = [
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemHostRegister_v2",
    "cuEventCreate",
    "cuModuleLoadData",
]


def main(library: Path) -> None:
    emulator = Emulator(library)
    emulator.reset(delay_us=10)
    engine = Engine(emulator, device=1, blocks=PIECES, pages=(PIECE,))
    driver = NvidiaDriver("cuda:1", lambda: engine.stream)
    copier = CudaCopier(driver)
    crossover.SCRATCH_BYTES, crossover._REPEATS, crossover._LONGEST_S = 2**18, 1, 600.0
    # The measurement copies random bytes in both directions, and fails if a byte is wrong.
    with capture_logs() as logs:
        learn(copier, "cuda:1")
    assert [entry["event"] for entry in logs] == ["copy_crossover_measured"], logs
    launches = emulator.calls("cuLaunchKernelEx")
    assert launches

    copier.use_kernel(dict.fromkeys(Direction, 2 * PIECE))
    host = driver.pinned(2 * PIECES * PIECE)
    there, back = host[: PIECES * PIECE], host[PIECES * PIECE :]
    there[:] = np.random.default_rng(0).integers(0, 256, len(there), np.uint8)
    places = np.arange(PIECES, dtype=np.int64) * PIECE
    on_device = engine.layout.regions[0].address + np.random.default_rng(1).permutation(places)
    size = np.full(PIECES, PIECE, np.int64)
    load = CopyRuns(there.ctypes.data + places, on_device, size)
    store = CopyRuns(on_device, back.ctypes.data + places, size)
    before = [emulator.calls(name) for name in ALLOCATIONS]
    for _ in range(SUBMISSIONS):
        for way, runs in ((Direction.LOAD, load), (Direction.STORE, store)):
            ticket = copier.submit(way, runs, (copier.fence(),))
            while (state := ticket.query()) is TicketState.PENDING:
                pass
            assert state is TicketState.DONE
    assert np.array_equal(there, back)
    assert emulator.calls("cuLaunchKernelEx") == launches + 2 * SUBMISSIONS
    assert [emulator.calls(name) for name in ALLOCATIONS] == before, "a batch has allocated"
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report
    load_many(emulator)
    check_gpu()
    assert emulator.faults == 0, emulator.report


def load_many(emulator: Emulator) -> None:
    """Load more pieces than the kernel's buffers hold: the kernel copies all, with one launch per query in a hook."""
    pieces, piece = 262_144, 16
    engine = Engine(emulator, device=1, blocks=pieces, pages=(piece,))
    driver = NvidiaDriver("cuda:1", lambda: engine.stream)
    copier = CudaCopier(driver)
    copier.use_kernel(dict.fromkeys(Direction, 2 * piece))
    host = driver.pinned(pieces * piece)
    host[:] = np.random.default_rng(2).integers(0, 256, len(host), np.uint8)
    places = np.arange(pieces, dtype=np.int64) * piece
    on_device = engine.layout.regions[0].address + places
    runs = CopyRuns(host.ctypes.data + places, on_device, np.full(pieces, piece, np.int64))
    before, batches = emulator.calls("cuLaunchKernelEx"), emulator.calls("cuMemcpyBatchAsync")
    ticket = copier.submit(Direction.LOAD, runs, (copier.fence(),))
    assert emulator.calls("cuLaunchKernelEx") == before + 1
    ticket.query()
    assert emulator.calls("cuLaunchKernelEx") <= before + 2
    with ThreadPoolExecutor(1) as coroutine:
        while (state := coroutine.submit(ticket.query).result()) is TicketState.PENDING:
            pass
    assert state is TicketState.DONE
    assert emulator.calls("cuLaunchKernelEx") == before + 32
    assert emulator.calls("cuMemcpyBatchAsync") == batches
    assert np.array_equal(engine.device_bytes(), host)
    assert (emulator.races, emulator.faults, emulator.waits_with_lock) == (0, 0, 0), emulator.report


def check_gpu() -> None:
    """Run the kernel as `kvoffload gpu-check` does, which also writes a profile of the run."""
    options = Options("cuda:1", size=1 << 20, repeats=1, host_bytes=1 << 30)
    found = {line.what: line for part in (copies.compared, copies.speeds) for line in part(options)}
    for way in ("loads", "stores"):
        for size in ("4,096", "33,808"):
            assert found[f"wrong bytes, {way} by the page kernel, pieces of {size} bytes"].verdict == "pass"
        assert found[f"{way} of 4 KiB by the page kernel"].median
    *_, last = copies.profile(options)
    assert GpuProfile() != read_profile("emulated device 1", "13.0"), last


if __name__ == "__main__":
    main(Path(sys.argv[1]))
