from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pytest

from kvoffload.model.errors import CopyError, DeviceLost, HostMemoryBusy, HostMemoryError
from kvoffload.model.wire import Direction
from kvoffload.transfer import host_memory
from kvoffload.transfer.cuda.copier import CudaCopier, CudaTicket
from kvoffload.transfer.cuda.driver import CudaPin, NvidiaDriver
from kvoffload.transfer.cuda.library import CudaError, CudaLibrary
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.ports import HELD_COPIES, TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.captured_logs import capture_logs
from tests.cuda_emulator import Emulator, Engine
from tests.gates import ManualExecutor

T = TypeVar("T")
PIECE = 64


class Bench:
    """A copier, with `pieces` pieces of device memory and as many pieces of pinned host memory."""

    def __init__(
        self, emulator: Emulator, pieces: int = 5, device: int = 0, batch_copies: str = "auto"
    ) -> None:
        self.engine = Engine(emulator, device, blocks=max(pieces, 1), pages=(PIECE,))
        self.driver = NvidiaDriver(f"cuda:{device}", lambda: self.engine.stream, batch_copies=batch_copies)
        self.event = self.driver.event(timed=True)
        self.host = self.driver.pinned(max(pieces, 64) * PIECE)
        self.host[:] = np.random.default_rng(0).integers(0, 256, len(self.host), np.uint8)
        rows = np.arange(pieces, dtype=np.int64) * PIECE
        on_device = self.engine.layout.regions[0].address + rows
        self.load = CopyRuns(self.host.ctypes.data + rows, on_device, np.full(pieces, PIECE, np.int64))
        self.store = CopyRuns(on_device, self.host.ctypes.data + rows, self.load.size)

    @cached_property
    def copier(self) -> CudaCopier:
        return CudaCopier(self.driver)

    def submit(self, way: Direction = Direction.LOAD) -> CudaTicket:
        runs = self.load if way is Direction.LOAD else self.store
        return self.copier.submit(way, runs, (self.copier.fence(),))

    def has_arrived(self) -> bool:
        return np.array_equal(self.engine.device_bytes(), self.host[: len(self.load) * PIECE])


@pytest.fixture
def bench(emulator: Emulator) -> Bench:
    return Bench(emulator)


def elsewhere(act: Callable[[], T]) -> T:
    """Run `act` on a thread that has not called the driver before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


@pytest.mark.parametrize(
    ("version", "architecture", "setting", "batches"),
    [
        (12040, 90, "auto", False),  # drivers of this version cannot copy in batches
        (12040, 90, "on", False),
        (12080, 90, "auto", True),
        # The driver also has a newer form of this call, so the version must be given.
        (13000, 90, "auto", True),
        (13000, 90, "off", False),
        (13000, 100, "auto", False),  # devices of this architecture were reported to crash on large batches
        (13000, 120, "auto", False),
        (13000, 120, "on", True),
    ],
)
def test_batches_are_used_only_with_drivers_and_devices_that_support_them(
    emulator: Emulator, version: int, architecture: int, setting: str, batches: bool
) -> None:
    emulator.reset(stepped=True, version=version)
    emulator.set_architecture(architecture)
    bench = Bench(emulator, batch_copies=setting)
    stream = bench.driver.stream(urgent=True)
    bench.driver.copy(Direction.LOAD, bench.load, stream)
    assert emulator.calls("cuMemcpyBatchAsync") == batches
    assert emulator.calls("cuMemcpyAsync") == (0 if batches else len(bench.load))
    emulator.step()
    assert bench.has_arrived()


@pytest.mark.parametrize(("pieces", "calls"), [(512, 1), (513, 2), (262_144, 512)])
def test_a_batch_is_enqueued_in_slices(emulator: Emulator, pieces: int, calls: int) -> None:
    bench = Bench(emulator, pieces)
    bench.driver.copy(Direction.LOAD, bench.load, bench.driver.stream(urgent=True))
    assert emulator.calls("cuMemcpyBatchAsync") == calls
    emulator.step()
    assert bench.has_arrived()


@pytest.mark.parametrize(("pieces", "keeps"), [(HELD_COPIES, True), (HELD_COPIES + 1, False)])
def test_enqueuing_keeps_the_gil_only_for_a_short_batch(emulator: Emulator, pieces: int, keeps: bool) -> None:
    bench = Bench(emulator, pieces)
    bench.copier.submit(Direction.LOAD, bench.load, ())
    for call, calls, with_lock in (("cuMemcpyBatchAsync", 1, keeps), ("cuEventRecord", 2, 2)):
        assert (emulator.calls(call), emulator.calls(call, with_lock=True)) == (calls, with_lock)


@pytest.mark.parametrize(("setting", "calls"), [("auto", 1), ("off", 256)])
def test_the_engines_thread_enqueues_a_large_load_one_slice_per_hook(
    emulator: Emulator, setting: str, calls: int
) -> None:
    call = "cuMemcpyAsync" if setting == "off" else "cuMemcpyBatchAsync"
    bench = Bench(emulator, 50_000, batch_copies=setting)
    fence, before = bench.copier.fence(), emulator.calls()
    ticket = bench.copier.submit(Direction.LOAD, bench.load, (fence,))
    assert emulator.calls(call) == calls
    assert emulator.calls() - before <= calls + 8
    emulator.step()  # this runs all enqueued operations, which are only a part of the load
    assert ticket.query() is TicketState.PENDING
    assert emulator.calls(call) == 2 * calls
    while elsewhere(ticket.query) is TicketState.PENDING:  # this thread stands for the transfer coroutine
        emulator.step()
    assert bench.has_arrived()
    assert emulator.races == 0


@pytest.mark.parametrize("setting", ["auto", "off"])
@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize("pieces", [1, 100, 5000])
def test_no_call_waits_for_a_stopped_stream(
    emulator: Emulator, setting: str, way: Direction, pieces: int
) -> None:
    bench = Bench(emulator, pieces, batch_copies=setting)
    emulator.gate(bench.engine.stream)
    tickets = [bench.submit(way) for _ in range(3000 // pieces // 10 or 3)]
    for _ in range(20):
        assert tickets[0].query() is TicketState.PENDING
        assert elsewhere(tickets[0].query) is TicketState.PENDING
    emulator.open()
    for ticket in tickets:
        while elsewhere(ticket.query) is TicketState.PENDING:
            emulator.step()
    assert emulator.waits_with_lock == 0
    assert emulator.waits == 0 or setting == "auto"  # a batch may wait, without the GIL
    assert (emulator.races, emulator.wrong, bench.has_arrived()) == (0, 0, True)


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_a_large_load_continues_although_later_loads_fill_the_queue(emulator: Emulator, setting: str) -> None:
    bench = Bench(emulator, 5000, batch_copies=setting)
    ticket = bench.submit()
    states = {ticket.query()}
    for _ in range(50):
        for pieces in (200, *[10] * 30):
            bench.copier.submit(Direction.LOAD, bench.load[:pieces], (bench.copier.fence(),))
        for _ in range(3):
            emulator.step()
            states |= {ticket.query()} if TicketState.DONE not in states else set()
    assert TicketState.DONE in states
    assert (emulator.races, bench.has_arrived()) == (0, True)


def test_the_coroutines_query_enqueues_two_slices_and_a_hooks_query_does_not_wait_for_them(
    emulator: Emulator,
) -> None:
    bench = Bench(emulator, 50_000)
    ticket = bench.copier.submit(Direction.LOAD, bench.load, ())
    submitted = emulator.calls("cuMemcpyBatchAsync")
    emulator.set_depth(10**6)  # This queue is so deep that the coroutine's calls do not wait.
    elsewhere(ticket.query)
    assert emulator.calls("cuMemcpyBatchAsync") - submitted == 2
    emulator.set_depth(1024)
    ticket.query()
    assert emulator.waits == 0


def test_a_batch_is_started_when_its_last_slice_is_enqueued(emulator: Emulator) -> None:
    bench = Bench(emulator, 10_000)
    ticket = bench.copier.submit(Direction.STORE, bench.store, ())
    found = {}
    for _ in range(10):
        found[emulator.calls("cuMemcpyBatchAsync")] = ticket.is_started
        emulator.step()
        ticket.query()
    slices = max(found)
    assert slices > 2
    assert found == {count: count == slices for count in found}


def test_a_fence_on_a_full_engine_stream_waits_without_the_gil(emulator: Emulator, bench: Bench) -> None:
    emulator.set_depth(4)
    emulator.gate(bench.engine.stream)
    for _ in range(6):
        bench.copier.fence()
    assert (emulator.waits, emulator.waits_with_lock) == (3, 0)


def test_r9_after_a_refused_slice_no_slice_follows_and_the_batch_ends_after_the_earlier_ones(
    emulator: Emulator,
) -> None:
    bench = Bench(emulator, 10_000)
    emulator.fail("cuMemcpyBatchAsync", 2, after=2)
    ticket = bench.copier.submit(Direction.LOAD, bench.load, ())
    assert elsewhere(ticket.query) is TicketState.PENDING
    assert emulator.calls("cuMemcpyBatchAsync") == 3  # three of five slices were enqueued
    assert elsewhere(ticket.query) is TicketState.PENDING
    emulator.step()
    assert ticket.query() is TicketState.FAILED
    assert emulator.calls("cuMemcpyBatchAsync") == 3


def test_a_refused_batch_names_the_copy_and_fails_after_its_accepted_copies(
    emulator: Emulator, bench: Bench
) -> None:
    emulator.limit_batches(3)
    with capture_logs() as logs:
        ticket = bench.submit()
    assert "copy 3 of 5 with CUDA_ERROR_OUT_OF_MEMORY (2)" in logs[0]["reason"]
    assert ticket.query() is TicketState.PENDING
    emulator.step()
    assert ticket.query() is TicketState.FAILED


def test_copies_of_unpinned_memory_are_refused(bench: Bench) -> None:
    pageable = np.zeros(PIECE * 5, np.uint8)
    runs = CopyRuns(pageable.ctypes.data + np.arange(5) * PIECE, bench.load.target, bench.load.size)
    with pytest.raises(CopyError, match="copy 0 of 5 with CUDA_ERROR_INVALID_VALUE"):
        bench.driver.copy(Direction.LOAD, runs, bench.driver.stream(urgent=True))


def test_streams_are_created_with_the_devices_priorities(emulator: Emulator, bench: Bench) -> None:
    priorities = {}
    for direction, stream in bench.copier._streams.items():
        found = ctypes.c_int()
        emulator.lib.cuStreamGetPriority(ctypes.c_void_p(stream), ctypes.byref(found))
        priorities[direction] = found.value
    assert priorities == {Direction.LOAD: -5, Direction.STORE: 0}
    assert bench.engine.stream not in bench.copier._streams.values()


def test_events_are_reused_when_their_batch_has_ended(emulator: Emulator, bench: Bench) -> None:
    for _ in range(3):
        made = emulator.calls("cuEventCreate")
        tickets = [bench.submit() for _ in range(70)]
        assert {ticket.query() for ticket in tickets} == {TicketState.PENDING}
        emulator.step()
        assert {ticket.query() for ticket in tickets} == {TicketState.DONE}
        del tickets[:]
    assert emulator.calls("cuEventCreate") == made


def test_a_batchs_time_leaves_out_its_wait_for_the_fence(emulator: Emulator, bench: Bench) -> None:
    bench.engine.write(0, 1, cost_s=100.0)
    ticket = bench.submit(Direction.STORE)
    assert ticket.copy_seconds is None
    emulator.step()
    assert ticket.query() is TicketState.DONE
    assert ticket.copy_seconds == pytest.approx(len(bench.store) * 1e-6, rel=0.1)


def test_a_batch_succeeds_even_if_its_time_is_unknown(emulator: Emulator, bench: Bench) -> None:
    ticket = bench.submit()
    emulator.step()
    emulator.fail("cuEventElapsedTime", 400)
    assert (ticket.query(), ticket.copy_seconds) == (TicketState.DONE, None)


def test_only_a_fence_reads_the_current_stream(
    emulator: Emulator, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = bench.copier.fence()
    monkeypatch.delattr(bench.driver, "_current_stream")  # the coroutine's thread has another one
    ticket = elsewhere(lambda: bench.copier.submit(Direction.STORE, bench.store, (fence,)))
    emulator.step()
    assert elsewhere(ticket.query) is TicketState.DONE


@pytest.mark.parametrize(
    ("call", "code", "after"),
    # the fence and the batch's start are recorded before its end
    [("cuEventQuery", 900, 0), ("cuEventQuery", 400, 0), ("cuEventQuery", 2, 0), ("cuEventRecord", 400, 2)],
)
def test_a_refused_query_or_end_event_does_not_end_the_batch(
    emulator: Emulator, bench: Bench, call: str, code: int, after: int
) -> None:
    emulator.fail(call, code, after=after, times=3)
    ticket = bench.submit()
    with capture_logs() as logs:
        assert [ticket.query() for _ in range(3)] == [TicketState.PENDING] * 3
    assert [entry["event"] for entry in logs] == ["copy_query_refused"]
    emulator.step()
    assert ticket.query() is TicketState.DONE


@pytest.mark.parametrize("code", [700, 719, 999, 810, 46])
def test_a_lost_device_ends_every_batch(emulator: Emulator, bench: Bench, code: int) -> None:
    ticket = bench.submit()
    emulator.lose(0, code)
    with pytest.raises(DeviceLost, match=rf"\({code}\)"):
        ticket.query()
    with pytest.raises(DeviceLost):
        bench.submit()
    bench.copier.close()  # this must not raise


@pytest.mark.parametrize("code", [3, 201])
def test_a_query_that_always_fails_ends_the_batch(emulator: Emulator, bench: Bench, code: int) -> None:
    ticket = bench.submit()
    emulator.fail("cuEventQuery", code)
    with pytest.raises(DeviceLost, match=rf"\({code}\)"):
        ticket.query()


@pytest.mark.usefixtures("emulator")
def test_drivers_before_cuda_12_do_not_use_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            if name == "cuGetProcAddress_v2":
                raise AttributeError(name)
            return super().__getattr__(name)

    monkeypatch.setattr(ctypes, "CDLL", Old)
    assert CudaLibrary().batch_copy() is None


def test_a_query_during_a_capture_neither_fails_nor_breaks_it(emulator: Emulator, bench: Bench) -> None:
    ticket = bench.submit()
    bench.engine.capture()
    assert elsewhere(ticket.query) is TicketState.PENDING
    emulator.step()
    assert elsewhere(ticket.query) is TicketState.DONE
    assert bench.engine.end_capture() == 0


def test_the_engines_thread_keeps_its_capture_mode(emulator: Emulator, bench: Bench) -> None:
    with bench.driver.scratch(4096, bench.driver.stream(urgent=False)):
        assert emulator.lib.emu_capture_mode() == 2
    assert emulator.lib.emu_capture_mode() == 0

    def of_another() -> int:
        bench.driver.record(bench.driver.event(timed=False), bench.engine.stream)
        return int(emulator.lib.emu_capture_mode())

    assert elsewhere(of_another) == 2


CALLS: dict[str, Callable[[Bench], object]] = {
    "has_passed": lambda bench: bench.driver.has_passed(bench.event),
    "event": lambda bench: bench.driver.event(timed=True),
    "record": lambda bench: bench.driver.record(bench.event, bench.engine.stream),
    "record_current": lambda bench: bench.driver.record_current(bench.event),
    "wait": lambda bench: bench.driver.wait(bench.engine.stream, bench.event),
    "stream": lambda bench: bench.driver.stream(urgent=True),
    "copy": lambda bench: bench.driver.copy(Direction.LOAD, bench.load, bench.engine.stream),
    "register": lambda bench: bench.driver.pinned(4096),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("other_device", [False, True])
def test_every_call_enters_its_own_device_and_creates_no_context_on_another(
    emulator: Emulator, call: str, other_device: bool
) -> None:
    bench = Bench(emulator, device=1)
    other = Engine(emulator, device=0) if other_device else None

    def enter() -> int:
        if other is not None:
            other.enter()
        assert emulator.lib.emu_current() == (-1 if other is None else 0)
        CALLS[call](bench)
        return int(emulator.lib.emu_current())

    assert elsewhere(enter) == 1
    assert emulator.contexts == (0b10 if other is None else 0b11)


def test_an_error_without_a_name_has_its_number(emulator: Emulator, bench: Bench) -> None:
    emulator.fail("cuMemHostRegister_v2", 12345)
    with pytest.raises(CudaError, match=r"cuMemHostRegister_v2 with an unknown error \(12345\)"):
        bench.driver.pinned(4096)


def test_scratch_memory_that_cannot_be_allocated_is_an_error(emulator: Emulator, bench: Bench) -> None:
    stream = bench.driver.stream(urgent=False)
    emulator.shift_host_addresses(4096)
    with (
        pytest.raises(HostMemoryError, match="cannot use the host's addresses"),
        bench.driver.scratch(4096, stream),
    ):
        pass
    emulator.shift_host_addresses(0)
    emulator.fail("cuMemAllocAsync", 2)
    with pytest.raises(CudaError, match="cuMemAllocAsync"), bench.driver.scratch(4096, stream):
        pass


def test_pinning_during_a_capture_is_retried_and_other_refusals_are_final(emulator: Emulator) -> None:
    pin, memory = CudaPin(Bench(emulator).driver), np.zeros(4096, np.uint8)
    emulator.fail("cuMemHostRegister_v2", 900)
    with pytest.raises(HostMemoryBusy, match=r"4096 bytes .* not pinned: .*CAPTURE_UNSUPPORTED"):
        pin.register(memory.ctypes.data, 4096)
    emulator.fail("cuMemHostRegister_v2", 2)
    with pytest.raises(HostMemoryError) as caught:
        pin.register(memory.ctypes.data, 4096)
    assert not isinstance(caught.value, HostMemoryBusy)


def test_memory_that_the_driver_does_not_release_stays_mapped(
    emulator: Emulator, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(host_memory, "_KEPT", kept)
    chunk = MmapAllocator(ManualExecutor(held=False), CudaPin(bench.driver))._allocate(1 << 20)
    emulator.fail("cuMemHostUnregister", 2)
    with capture_logs() as logs:
        chunk.release()
    assert [entry["event"] for entry in logs] == ["host_memory_not_unpinned"]
    assert kept
    ctypes.memset(chunk.address, 1, 16)


def test_pinned_memory_is_released_on_the_executors_threads(emulator: Emulator, bench: Bench) -> None:
    executor = ManualExecutor(held=False)
    chunk = MmapAllocator(executor, CudaPin(bench.driver))._allocate(1 << 20)
    before = emulator.calls("cuMemHostUnregister")
    executor.hold()
    chunk.release()
    assert emulator.calls("cuMemHostUnregister") == before
    executor.release()
    assert emulator.calls("cuMemHostUnregister") == before + 1


def test_closing_destroys_streams_and_events(emulator: Emulator, bench: Bench) -> None:
    bench.submit()
    bench.copier.close()
    assert emulator.calls("cuStreamDestroy_v2") == 2
    emulator.step()
    assert bench.has_arrived()  # work that was already enqueued on a stream still runs
