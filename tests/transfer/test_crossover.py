from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda import crossover
from kvoffload.transfer.cuda.copier import ENGINE_ONLY, CudaCopier, GpuProfile, split
from kvoffload.transfer.cuda.crossover import Trial, learn
from kvoffload.transfer.cuda.driver import CudaScratch, NvidiaDriver
from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.captured_logs import capture_logs
from tests.cuda_emulator import Emulator, Engine
from tests.cuda_emulator.page_kernel import install

KIB = 1024
SCRATCH = 512 * KIB


class Device:
    """A device on which the copy engine is as fast as the kernel from these sizes on. Each call copies at once.

    An event takes a second of its time, and a copy as long as `seconds` returns.
    """

    def __init__(self, *, load_wins_from: int, store_wins_from: int) -> None:
        self.wins_from = {Direction.LOAD: load_wins_from, Direction.STORE: store_wins_from}
        self.time, self.lent, self.kernels = 0.0, 0, dict[int, object]()

    def stream(self, *, urgent: bool) -> int:
        return int(urgent)

    def event(self, *, timed: bool) -> SimpleNamespace:
        return SimpleNamespace(passed_at=None)

    def record(self, event: SimpleNamespace, stream: int) -> None:
        self.time += 1.0
        event.passed_at = self.time

    def has_passed(self, event: SimpleNamespace) -> bool:
        return event.passed_at is not None

    def seconds_between(self, start: SimpleNamespace, end: SimpleNamespace) -> float:
        return float(end.passed_at - start.passed_at)

    def copy(self, direction: Direction, runs: CopyRuns, stream: int) -> None:
        copy_by_memmove(runs)
        self.time += self.seconds(direction, runs)

    def seconds(self, direction: Direction, runs: CopyRuns) -> float:
        return 0.99 * max(runs.total_bytes, len(runs) * self.wins_from[direction])

    def copy_by_kernel(self, runs: CopyRuns, stream: int) -> None:
        copy_by_memmove(runs)
        self.time += runs.total_bytes

    @contextmanager
    def scratch(self, size: int, stream: int) -> Iterator[CudaScratch]:
        device = np.zeros(SCRATCH, np.uint8)
        self.lent += 1
        yield CudaScratch(device.ctypes.data, np.zeros(2 * SCRATCH, np.uint8))
        self.lent -= 1


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def learned(device: Device, profile: GpuProfile | None = None) -> CudaCopier:
    copier = CudaCopier(device)  # type: ignore[arg-type]
    copier.profile = profile or GpuProfile()
    learn(copier, "cuda:0")
    return copier


def test_the_search_ends_at_the_first_size_at_which_the_copy_engine_is_as_fast() -> None:
    device = Device(load_wins_from=32 * KIB, store_wins_from=4 * KIB)
    with capture_logs() as logs:
        copier = learned(device)
    assert copier.kernel_below == {Direction.LOAD: 32 * KIB, Direction.STORE: 4 * KIB}
    (entry,) = logs
    found = entry["event"], entry["load_below_bytes"], entry["store_below_bytes"]
    assert found == ("copy_crossover_measured", 32 * KIB, 4 * KIB)
    assert device.lent == 0


def test_the_copy_engine_makes_all_copies_if_always_faster_and_only_long_ones_if_never() -> None:
    copier = learned(Device(load_wins_from=0, store_wins_from=2**30))
    assert copier.kernel_below == {Direction.LOAD: 0, Direction.STORE: 512 * KIB}


@pytest.mark.parametrize("stores", [True, False])
def test_the_kernel_is_prepared_for_the_directions_that_use_it(stores: bool) -> None:
    device = Device(load_wins_from=32 * KIB, store_wins_from=32 * KIB)
    copier = learned(device, GpuProfile(stores=stores))
    assert copier.kernel_below == {Direction.LOAD: 32 * KIB, Direction.STORE: 32 * KIB if stores else 0}
    assert (copier.stream(Direction.STORE) in device.kernels) is stores


def moves_wrong_bytes(runs: CopyRuns, stream: int) -> None:
    copy_by_memmove(runs[1:])


def never_passes(event: object) -> bool:
    return False


def has_no_memory(size: int, stream: int) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("copy_by_kernel", moves_wrong_bytes),
        ("has_passed", never_passes),
        ("scratch", has_no_memory),
    ],
)
def test_after_any_error_while_measuring_the_copy_engine_makes_all_copies(
    call: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover, "_PATIENCE_S", 0.0)
    device = Device(load_wins_from=32 * KIB, store_wins_from=32 * KIB)
    monkeypatch.setattr(device, call, fault)
    with capture_logs() as logs:
        copier = learned(device)
    assert copier.kernel_below == ENGINE_ONLY
    assert [entry["event"] for entry in logs] == ["page_kernel_unavailable"]


def test_without_triton_the_copy_engine_makes_all_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvoffload.transfer.cuda.page_kernel", None)
    with capture_logs() as logs:
        copier = learned(Device(load_wins_from=32 * KIB, store_wins_from=32 * KIB))
    assert copier.kernel_below == ENGINE_ONLY
    assert [entry["event"] for entry in logs] == ["page_kernel_unavailable"]


def test_the_measurement_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "_LONGEST_S", -1.0)
    assert learned(Device(load_wins_from=32 * KIB, store_wins_from=32 * KIB)).kernel_below == ENGINE_ONLY


def test_timed_copies_follow_copies_that_hide_the_enqueuing_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device, copies = Device(load_wins_from=0, store_wins_from=0), list[CopyRuns]()

    def second(direction: Direction, runs: CopyRuns) -> float:
        copies.append(runs)
        return 1.0

    monkeypatch.setattr(device, "seconds", second)
    runs = CopyRuns(*(np.zeros(0, np.int64) for _ in range(3)))
    with device.scratch(0, 0) as scratch:
        trial = Trial(device, 0, scratch, cover_s=0.25)  # type: ignore[arg-type]
        trial.enqueue_s[False] = 1.0
        timed = trial.seconds(Direction.LOAD, runs, by_kernel=False)
    # Six copies of 0.25 s last 1.5 times as long as the last enqueuing (1 s). The seventh copy is timed.
    assert [len(copy) for copy in copies] == [1] * 6 + [0]
    assert timed == 1 + 1


def test_a_batchs_time_is_its_enqueuing_time_if_that_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, piece, device = [0.0], 8 * KIB, Device(load_wins_from=0, store_wins_from=0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    seconds = device.seconds

    def slow(direction: Direction, runs: CopyRuns) -> float:
        clock[0] += float(len(runs)) * 2 * piece
        return seconds(direction, runs)

    monkeypatch.setattr(device, "seconds", slow)
    assert learned(device).kernel_below == dict.fromkeys(Direction, 2 * piece)


class NotingDriver(NvidiaDriver):
    """Notes how many copies the page kernel and the copy engine make."""

    def __init__(self, engine: Engine) -> None:
        super().__init__("cuda:0", lambda: engine.stream)
        self.made: list[tuple[str, int]] = []

    def copy(self, direction: Direction, runs: CopyRuns, stream: int) -> None:
        super().copy(direction, runs, stream)
        self.made.append(("copy", len(runs)))

    def copy_by_kernel(self, runs: CopyRuns, stream: int) -> None:
        super().copy_by_kernel(runs, stream)
        self.made.append(("kernel", len(runs)))


class Batch:
    """A batch of 40 copies of 64 bytes and 2 copies of 4 KiB. Stores of less than 1 KiB use the kernel."""

    def __init__(self, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self._emulator, self._engine = emulator, Engine(emulator, blocks=1, pages=(40 * 64 + 2 * 4096,))
        self.driver = NotingDriver(self._engine)
        self.copier = CudaCopier(self.driver)
        self.copier.use_kernel({Direction.LOAD: 0, Direction.STORE: KIB})
        self._host = self.driver.pinned(self._engine.layout.slot_bytes)
        size = np.array([64] * 40 + [4096] * 2, np.int64)
        starts = np.cumsum(size) - size
        on_device = self._engine.layout.regions[0].address + starts
        self.store = CopyRuns(on_device, self._host.ctypes.data + starts, size)

    def run(self) -> None:
        """Store the batch, and check that all bytes arrive."""
        self._engine.write(0, seed=1)
        ticket = self.copier.submit(Direction.STORE, self.store, (self.copier.fence(),))
        self._emulator.step()
        assert ticket.query() is TicketState.DONE
        assert np.array_equal(self._engine.device_bytes(), self._host)
        assert self._emulator.races == 0


@pytest.fixture
def batch(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Batch:
    return Batch(emulator, monkeypatch)


def test_the_kernel_makes_short_copies_and_the_copy_engine_makes_the_others(batch: Batch) -> None:
    batch.run()
    assert batch.driver.made == [("kernel", 40), ("copy", 2)]


def test_each_direction_has_its_own_limit(batch: Batch) -> None:
    load = CopyRuns(batch.store.target, batch.store.source, batch.store.size)
    batch.copier.submit(Direction.LOAD, load, ())
    assert batch.driver.made == [("copy", 42)]


def test_a_kernel_that_does_not_start_is_switched_off_and_the_copy_engine_copies_its_batch(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(runs: CopyRuns) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setitem(batch.driver.kernels, batch.copier.stream(Direction.STORE), refuse)
    with capture_logs() as logs:
        batch.run()
        batch.run()
    assert [entry["event"] for entry in logs] == ["page_kernel_off"]
    assert batch.copier.kernel_below == ENGINE_ONLY
    assert batch.driver.made == [("copy", 40), ("copy", 2), ("copy", 42)]


@pytest.mark.parametrize(("fewest", "made"), [(40, [("kernel", 40), ("copy", 2)]), (41, [("copy", 42)])])
def test_the_kernel_is_used_from_the_measured_number_of_short_copies(
    batch: Batch, fewest: int, made: list[tuple[str, int]]
) -> None:
    batch.copier.profile = GpuProfile(fewest=fewest)
    batch.run()
    assert batch.driver.made == made


@given(st.lists(st.integers(1, 200), max_size=60), st.sampled_from([0, 64, 100, 1000]))
def test_every_copy_is_made_once_and_only_short_aligned_ones_by_the_kernel(
    sizes: list[int], below: int
) -> None:
    size = np.array(sizes, np.int64)
    starts = np.arange(len(size), dtype=np.int64) * 208
    source = np.random.default_rng(0).integers(0, 256, 208 * 60 + 32, np.uint8)
    target, wanted = np.zeros_like(source), np.zeros_like(source)
    for start, length in zip(starts.tolist(), sizes, strict=True):
        wanted[start : start + length] = source[start : start + length]
    runs = CopyRuns(source.ctypes.data + starts, target.ctypes.data + starts, size)
    short, rest = split(runs, below, 16)
    assert (short.size < below).all()
    assert not ((short.source | short.target) % 16).any()
    assert len(short) == 0 or len(short) >= 16
    for part in (short, rest):
        copy_by_memmove(part)
    assert np.array_equal(target, wanted)
    assert len(short) + len(rest) == len(runs)
