from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvoffload.model.wire import Direction
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.cuda.copier import ENGINE_ONLY, CudaCopier
from kvoffload.transfer.cuda.crossover import SCRATCH_BYTES, Trial, learn
from kvoffload.transfer.cuda.driver import NvidiaDriver
from kvoffload.transfer.factory import current_stream, make_allocator, make_copier
from kvoffload.transfer.layout import layout_of
from kvoffload.transfer.ports import Clocks, Ticket, TicketState
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
        self.arena = Arena(
            self.layout, SLOTS, make_allocator(self.layout, executor=executor), chunk_bytes=40 * 12288
        )
        asyncio.run(self.arena.prepare())
        self.driver = device_driver(batch_copies="on" if batched else "off")
        self.copier = CudaCopier(self.driver)

    def copy(self, direction: Direction, slots: np.ndarray, blocks: np.ndarray) -> None:
        wait_for(self.start(direction, slots, blocks))

    def start(self, direction: Direction, slots: np.ndarray, blocks: np.ndarray) -> Ticket:
        runs = merge_runs(self.arena.geometry, direction, slots, blocks)
        return self.copier.submit(direction, runs, (self.copier.fence(),))

    def close(self) -> None:
        torch.cuda.synchronize()
        self.copier.close()
        self.arena.close()


def wait_for(ticket: Ticket) -> None:
    torch.cuda.synchronize()  # Tests may wait for the device, but the copier must not.
    assert ticket.query() is TicketState.DONE
    assert ticket.copy_seconds is not None


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


def test_a_round_trip_copies_every_byte_and_no_other(gpu: Gpu) -> None:
    slots, blocks = pairs(0)
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


def test_a_store_reads_the_forward_passs_writes(gpu: Gpu) -> None:
    slots, blocks = pairs(1)
    torch.cuda._sleep(200_000_000)  # about 0.1 s, so a copy that does not wait would run before the fill
    for tensor in gpu.tensors:
        tensor.fill_(7)
    ticket = gpu.start(Direction.STORE, slots, blocks)
    assert ticket.query() is TicketState.PENDING  # the submission did not wait for the kernels
    wait_for(ticket)
    assert all(set(gpu.arena.pages(slot)[0].tobytes()) == {7} for slot in slots.tolist())


def test_a_load_writes_after_earlier_kernels_have_zeroed(gpu: Gpu) -> None:
    slots, blocks = pairs(2)
    expected = [tensor.clone() for tensor in gpu.tensors]
    gpu.copy(Direction.STORE, slots, blocks)
    torch.cuda._sleep(200_000_000)
    for tensor in gpu.tensors:
        tensor[:50] = 0
    wait_for(gpu.start(Direction.LOAD, slots, blocks))
    for tensor, want in zip(gpu.tensors, expected, strict=True):
        assert torch.equal(tensor, want)


def test_fences_follow_the_current_stream(gpu: Gpu) -> None:
    slots, blocks = pairs(3)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        for tensor in gpu.tensors:
            tensor.fill_(9)
        ticket = gpu.start(Direction.STORE, slots, blocks)
    wait_for(ticket)
    assert all(set(gpu.arena.pages(slot)[1].tobytes()) == {9} for slot in slots.tolist())


def test_another_thread_can_submit(gpu: Gpu) -> None:
    from concurrent.futures import ThreadPoolExecutor

    slots, blocks = pairs(4)
    fence = gpu.copier.fence()
    runs = merge_runs(gpu.arena.geometry, Direction.STORE, slots, blocks)
    with ThreadPoolExecutor(1) as pool:
        wait_for(pool.submit(gpu.copier.submit, Direction.STORE, runs, (fence,)).result())
    slot, block = int(slots[0]), int(blocks[0])
    assert gpu.arena.pages(slot)[0].tobytes() == gpu.tensors[0][block].cpu().numpy().tobytes()


def test_the_kernel_copies_any_bytes_and_no_other() -> None:
    driver = device_driver()
    stream = driver.stream(urgent=False)
    driver.prepare_kernel(stream, 32)
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
    driver = device_driver()
    stream = driver.stream(urgent=False)
    driver.prepare_kernel(stream, 32)
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


def test_the_factory_chooses_by_device(gpu: Gpu) -> None:
    copier = make_copier(gpu.layout, executor=ManualExecutor(), clock=Clocks())
    assert isinstance(copier, CudaCopier)


def test_the_host_memory_for_a_gpu_is_pinned(gpu: Gpu) -> None:
    array = np.frombuffer(gpu.arena.pages(0)[0], np.uint8)
    assert torch.from_numpy(array).is_pinned()
