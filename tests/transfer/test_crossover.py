from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda import crossover
from kvoffload.transfer.cuda.copier import ENGINE_ONLY, CudaCopier, GpuProfile, split
from kvoffload.transfer.cuda.crossover import Trial, learn
from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.captured_logs import capture_logs
from tests.transfer.fake_cuda import FakeCuda, Stream

KIB = 1024


class Device(FakeCuda):
    """A fake device that runs operations when queried. The kernel's time depends only on a piece's size."""

    def __init__(self, *, load_wins_from: int, store_wins_from: int) -> None:
        super().__init__()
        self.scratch_bytes = 512 * KIB
        self.wins_from = {Direction.LOAD: load_wins_from, Direction.STORE: store_wins_from}
        self.direction = Direction.LOAD
        self.seconds = self._seconds

    def copy(self, direction: Direction, runs: CopyRuns, stream: Stream) -> None:
        self.direction = direction
        super().copy(direction, runs, stream)

    def has_passed(self, event: object) -> bool:
        for stream in self.streams:
            self.run(stream)
        return super().has_passed(event)  # type: ignore[arg-type]

    def _seconds(self, kind: str, runs: CopyRuns) -> float:
        if kind == "kernel":
            return float(runs.total_bytes)
        return max(float(runs.total_bytes), float(len(runs) * self.wins_from[self.direction])) * 0.99


def learned(device: Device, profile: GpuProfile | None = None) -> CudaCopier:
    copier: CudaCopier = CudaCopier(device)  # type: ignore[arg-type]
    copier.profile = profile or GpuProfile()
    learn(copier, "cuda:0")
    return copier


def test_the_search_ends_at_the_first_size_at_which_the_copy_engine_is_as_fast() -> None:
    device = Device(load_wins_from=32 * KIB, store_wins_from=4 * KIB)
    with capture_logs() as logs:
        copier = learned(device)
    assert copier.kernel_below == {Direction.LOAD: 32 * KIB, Direction.STORE: 4 * KIB}
    (entry,) = logs
    assert (entry["event"], entry["load_below_bytes"], entry["store_below_bytes"]) == (
        "copy_crossover_measured",
        32 * KIB,
        4 * KIB,
    )
    assert device.lent == 0


def test_the_copy_engine_makes_all_copies_if_always_faster_and_only_long_ones_if_never() -> None:
    copier = learned(Device(load_wins_from=0, store_wins_from=2**30))
    assert copier.kernel_below == {Direction.LOAD: 0, Direction.STORE: 512 * KIB}


@pytest.mark.parametrize("stores", [True, False])
def test_the_kernel_is_prepared_for_the_directions_that_use_it(stores: bool) -> None:
    device = Device(load_wins_from=32 * KIB, store_wins_from=32 * KIB)
    copier = learned(device, GpuProfile(stores=stores))
    assert copier.kernel_below == {Direction.LOAD: 32 * KIB, Direction.STORE: 32 * KIB if stores else 0}
    assert (copier.stream(Direction.STORE) in device.prepared) is stores


def fails_to_import(device: Device) -> None:
    device.kernel_error = ModuleNotFoundError("No module named 'triton'")


def moves_wrong_bytes(device: Device) -> None:
    enqueue = device.copy_by_kernel

    def one_short(runs: CopyRuns, stream: Stream) -> None:
        enqueue(CopyRuns(runs.source[1:], runs.target[1:], runs.size[1:]), stream)

    device.copy_by_kernel = one_short  # type: ignore[method-assign]


def never_ends(device: Device) -> None:
    device.has_passed = lambda event: False  # type: ignore[method-assign]


def has_no_memory(device: Device) -> None:
    def refuse(size: int, stream: Stream) -> None:
        raise MemoryError

    device.scratch = refuse  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("fault", [fails_to_import, moves_wrong_bytes, never_ends, has_no_memory])
def test_after_any_error_while_measuring_the_copy_engine_makes_all_copies(
    fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover, "_PATIENCE_S", 0.0)
    device = Device(load_wins_from=32 * KIB, store_wins_from=32 * KIB)
    assert callable(fault)
    fault(device)
    with capture_logs() as logs:
        copier = learned(device)
    assert copier.kernel_below == ENGINE_ONLY
    assert [entry["event"] for entry in logs] == ["page_kernel_unavailable"]


def test_the_measurement_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "_LONGEST_S", -1.0)
    assert learned(Device(load_wins_from=32 * KIB, store_wins_from=32 * KIB)).kernel_below == ENGINE_ONLY


def test_timed_copies_follow_copies_that_hide_the_enqueuing_time() -> None:
    device = Device(load_wins_from=0, store_wins_from=0)
    stream = device.stream(urgent=False)
    kinds: list[str] = []

    def second(kind: str, runs: CopyRuns) -> float:
        kinds.append(kind)
        return 1.0

    device.seconds = second
    with device.scratch(0, stream) as scratch:
        trial = Trial(device, stream, scratch, cover_s=0.25)  # type: ignore[arg-type]
        trial.enqueue_s[False] = 1.0
        start = device.time
        runs = CopyRuns(*(np.zeros(0, np.int64) for _ in range(3)))
        timed = trial.seconds(Direction.LOAD, runs, by_kernel=False)
    # Six copies of 0.25 s last 1.5 times as long as the last enqueuing (1 s). The seventh copy is timed.
    assert len(kinds) == 6 + 1
    # the six copies, the timed copy, and an event before and after it
    assert device.time - start == 6 + 1 + 2
    assert timed == 1 + 1


def test_a_batchs_time_is_its_enqueuing_time_if_that_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, piece = [0.0], 8 * KIB
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow(Device):
        def copy(self, direction: Direction, runs: CopyRuns, stream: Stream) -> None:
            clock[0] += float(len(runs)) * 2 * piece
            super().copy(direction, runs, stream)

    copier = learned(Slow(load_wins_from=0, store_wins_from=0))
    assert copier.kernel_below == dict.fromkeys(Direction, 2 * piece)


class Batch:
    """A copier with known limits, and a batch of 40 copies of 64 bytes and 2 copies of 4 KiB."""

    def __init__(self, below: int = KIB) -> None:
        self.cuda = FakeCuda()
        self.copier: CudaCopier = CudaCopier(self.cuda)  # type: ignore[arg-type]
        self.copier.kernel_below = {Direction.LOAD: 0, Direction.STORE: below}
        self.loads, self.stores = self.cuda.streams
        size = np.array([64] * 40 + [4096] * 2, np.int64)
        self.source = np.random.default_rng(0).integers(0, 256, int(size.sum()) + 16, np.uint8)
        self.target = np.zeros_like(self.source)
        starts = np.cumsum(size) - size
        addresses = [
            array.ctypes.data + -array.ctypes.data % 16 + starts for array in (self.source, self.target)
        ]
        self.runs = CopyRuns(addresses[0], addresses[1], size)

    def arrived(self) -> bool:
        size = self.runs.total_bytes
        first, second = (int(where[0]) for where in (self.runs.source, self.runs.target))
        begin = (first - self.source.ctypes.data, second - self.target.ctypes.data)
        return np.array_equal(self.source[begin[0] :][:size], self.target[begin[1] :][:size])

    def kinds(self, stream: Stream) -> list[tuple[str, int]]:
        return [(kind, len(what)) for kind, what in stream.operations if isinstance(what, CopyRuns)]


def test_the_kernel_makes_short_copies_and_the_copy_engine_makes_the_others_after_the_fence() -> None:
    batch = Batch()
    ticket = batch.copier.submit(Direction.STORE, batch.runs, (batch.copier.fence(),))
    assert [kind for kind, _ in batch.stores.operations] == [
        "wait",
        "record",
        "kernel",
        "record",
        "copy",
        "record",
    ]
    assert batch.kinds(batch.stores) == [("kernel", 40), ("copy", 2)]
    batch.cuda.run(batch.cuda.main)
    batch.cuda.run(batch.stores)
    assert ticket.query() is TicketState.DONE
    assert batch.arrived()


def test_each_direction_has_its_own_limit() -> None:
    batch = Batch()
    batch.copier.submit(Direction.LOAD, batch.runs, ())
    assert batch.kinds(batch.loads) == [("copy", 42)]


def test_a_kernel_that_does_not_start_is_switched_off_and_the_copy_engine_copies_its_batch() -> None:
    batch = Batch()
    batch.cuda.kernel_error = RuntimeError("out of resources")
    with capture_logs() as logs:
        tickets = [batch.copier.submit(Direction.STORE, batch.runs, ()) for _ in range(2)]
    assert [entry["event"] for entry in logs] == ["page_kernel_off"]
    assert batch.copier.kernel_below == ENGINE_ONLY
    assert batch.kinds(batch.stores) == [("copy", 40), ("copy", 2), ("copy", 42)]
    batch.cuda.run(batch.stores)
    assert [ticket.query() for ticket in tickets] == [TicketState.DONE] * 2
    assert batch.arrived()


@pytest.mark.parametrize(("fewest", "by_kernel"), [(40, [40]), (41, [])])
def test_the_kernel_is_used_from_the_measured_number_of_short_copies(
    fewest: int, by_kernel: list[int]
) -> None:
    batch = Batch()
    batch.copier.profile = GpuProfile(fewest=fewest)
    batch.copier.submit(Direction.STORE, batch.runs, ())
    assert [count for kind, count in batch.kinds(batch.stores) if kind == "kernel"] == by_kernel


@given(
    sizes=st.lists(st.integers(1, 200), max_size=60),
    below=st.sampled_from([0, 64, 100, 1000]),
)
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
