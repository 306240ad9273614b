from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvoffload.model.wire import Direction
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.cuda.copier import ENGINE_ONLY, CudaCopier, GpuProfile
from kvoffload.transfer.cuda.crossover import SCRATCH_BYTES, Trial, learn
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.factory import current_stream, make_allocator
from kvoffload.transfer.layout import layout_of
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns, merge_runs
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor

# Triton warns about its own defaults
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_")]

BLOCKS, SLOTS = 64, 96
BY_KERNEL = {Direction.LOAD: 2**62, Direction.STORE: 2**62}


def device_driver(batch_copies: str = "auto") -> NvidiaDriver:
    torch.cuda.init()
    return NvidiaDriver("cuda:0", current_stream("cuda:0"), batch_copies=batch_copies)


class Gpu:
    """Two device tensors, one of them with padded pages, and an arena with pinned chunks."""

    def __init__(self, *, batched: bool) -> None:
        wide = torch.randint(0, 256, (BLOCKS, 4096 + 512), dtype=torch.uint8, device="cuda")
        self.tensors = [
            torch.randint(0, 256, (BLOCKS, 8192), dtype=torch.uint8, device="cuda"),
            wide[:, :4096],
        ]
        self.layout = layout_of(self.tensors)
        executor = ManualExecutor(held=False)
        allocator = make_allocator(self.layout, executor=executor)
        self.arena = Arena(self.layout, SLOTS, allocator, chunk_bytes=40 * 12288)
        asyncio.run(self.arena.prepare())
        self.driver = device_driver(batch_copies="on" if batched else "off")
        self.copier = CudaCopier(self.driver)

    def copy(self, direction: Direction, slots: np.ndarray, blocks: np.ndarray) -> None:
        runs = merge_runs(self.arena.geometry, direction, slots, blocks)
        ticket = self.copier.submit(direction, runs, (self.copier.fence(),))
        torch.cuda.synchronize()
        assert ticket.query() is TicketState.DONE
        assert ticket.copy_seconds is not None

    def close(self) -> None:
        torch.cuda.synchronize()
        self.copier.close()
        self.arena.close()


@pytest.fixture(params=["batched", "one_by_one", "kernel"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    gpu = Gpu(batched=request.param == "batched")
    if request.param == "batched" and not gpu.driver.is_batched:
        gpu.close()
        pytest.skip("this driver gives no batched copies")
    limits = BY_KERNEL if request.param == "kernel" else ENGINE_ONLY
    if limits is BY_KERNEL:
        gpu.copier.use_kernel(limits)
        gpu.copier.kernel_below = limits
        # this compiles the kernel, so that no later test waits for the compilation
        gpu.copy(Direction.LOAD, *pairs(9))
    gpu.copier.kernel_below = limits
    yield gpu
    assert gpu.copier.kernel_below is limits
    gpu.close()


def pairs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    slots = np.concatenate((np.arange(30, 50), random.permutation(30)))
    return slots.astype(np.int64), np.arange(50, dtype=np.int64)


def test_a_round_trip_through_pinned_memory_copies_every_byte_and_no_other(gpu: Gpu) -> None:
    slots, blocks = pairs(0)
    assert torch.from_numpy(np.frombuffer(gpu.arena.pages(0)[0], np.uint8)).is_pinned()
    original = [tensor.clone() for tensor in gpu.tensors]
    gpu.copy(Direction.STORE, slots, blocks)
    for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
        for region, tensor in enumerate(gpu.tensors):
            assert gpu.arena.pages(slot)[region].tobytes() == tensor[block].cpu().numpy().tobytes()
    for tensor in gpu.tensors:
        tensor[:50] = 0
    gpu.copy(Direction.LOAD, slots, blocks)
    for tensor, expected in zip(gpu.tensors, original, strict=True):
        assert torch.equal(tensor, expected)


def prepared() -> tuple[NvidiaDriver, int]:
    """Return a driver, and a stream that is prepared for the kernel."""
    copier = CudaCopier(device_driver(), GpuProfile(programs=32))
    copier.prepare_kernel(Direction.STORE)
    return copier.driver, copier.stream(Direction.STORE)


def test_the_kernel_copies_any_bytes_and_no_other() -> None:
    driver, stream = prepared()
    random = np.random.default_rng(5)
    with driver.scratch(2**20, stream) as scratch:
        there, back = scratch.host[: 2**20], scratch.host[2**20 :]
        there[:], back[:] = random.integers(0, 256, 2**20, np.uint8), 0
        size = random.integers(1, 4000, 250)
        size[::2] = size[::2] // 16 * 16 + 16
        places = np.arange(250) * 4096
        shift = random.integers(0, 32, 250)
        shift[::2] = 0
        on_device = scratch.device + random.permutation(places)
        runs = CopyRuns(there.ctypes.data + places + shift, on_device, size)
        again = CopyRuns(on_device, back.ctypes.data + places + shift, size)
        driver.copy_by_kernel(runs, stream)
        driver.copy_by_kernel(again, stream)
        torch.cuda.synchronize()
        wanted = np.zeros_like(there)
        for begin, length in zip((places + shift).tolist(), size.tolist(), strict=True):
            wanted[begin : begin + length] = there[begin : begin + length]
        assert np.array_equal(back, wanted)


def test_the_crossover_is_measured_and_leaves_the_memory_as_it_was() -> None:
    driver, stream = prepared()
    with driver.scratch(SCRATCH_BYTES, stream) as scratch:
        limits = Trial(driver, stream, scratch).limits()
    assert set(limits) == {Direction.LOAD, Direction.STORE}
    assert all(limit == 0 or 4096 <= limit <= 2**19 for limit in limits.values())
    before = torch.cuda.memory_reserved()
    copier = CudaCopier(driver)
    with capture_logs() as logs:
        learn(copier, "cuda:0")
    assert [entry["event"] for entry in logs] == ["copy_crossover_measured"]
    assert torch.cuda.memory_reserved() == before
