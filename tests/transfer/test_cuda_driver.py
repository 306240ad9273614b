from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from kvoffload.model.errors import CopyError, DeviceLost, HostMemoryBusy, HostMemoryError
from kvoffload.model.wire import Direction
from kvoffload.transfer import host_memory
from kvoffload.transfer.cuda.copier import CudaCopier
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
    """One device with `pieces` pieces of memory, and as many pieces of pinned host memory."""

    def __init__(
        self, emulator: Emulator, pieces: int = 5, device: int = 0, batch_copies: str = "auto"
    ) -> None:
        self.emulator = emulator
        self.engine = Engine(emulator, device, blocks=max(pieces, 1), pages=(PIECE,))
        self.driver = NvidiaDriver(f"cuda:{device}", lambda: self.engine.stream, batch_copies=batch_copies)
        self.event = self.driver.event(timed=True)
        self.host = self.driver.pinned(max(pieces, 64) * PIECE)
        self.host[:] = np.random.default_rng(0).integers(0, 256, len(self.host), np.uint8)
        rows = np.arange(pieces, dtype=np.int64) * PIECE
        on_device = self.engine.layout.regions[0].address + rows
        self.load = CopyRuns(self.host.ctypes.data + rows, on_device, np.full(pieces, PIECE, np.int64))
        self.store = CopyRuns(on_device, self.host.ctypes.data + rows, self.load.size)

    def device_bytes(self) -> np.ndarray:
        found = np.zeros(len(self.load) * PIECE, np.uint8)
        address = self.engine.layout.regions[0].address
        assert self.emulator.lib.emu_peek(address, found.ctypes.data, len(found))
        return found

    def has_arrived(self) -> bool:
        return np.array_equal(self.device_bytes(), self.host[: len(self.load) * PIECE])


def elsewhere(act: Callable[[], T]) -> T:
    """Run `act` on a thread that has not called the driver before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def test_without_the_library_the_start_reports_it() -> None:
    code = (
        "import ctypes\n"
        "def no(*a, **k): raise OSError('libcuda.so.1: cannot open shared object file')\n"
        "ctypes.PyDLL = no\n"
        "from kvoffload.transfer.cuda.driver import NvidiaDriver\n"
        "NvidiaDriver('cuda:0')"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "EngineContractError: no NVIDIA driver library for cuda:0: libcuda.so.1" in ended.stderr


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
    copier = CudaCopier(bench.driver)
    records = emulator.calls("cuEventRecord"), emulator.calls("cuEventRecord", with_lock=True)
    copier.submit(Direction.LOAD, bench.load, ())
    assert emulator.calls("cuMemcpyBatchAsync") == 1
    assert emulator.calls("cuMemcpyBatchAsync", with_lock=True) == keeps
    assert emulator.calls("cuEventRecord") - records[0] == 2
    assert emulator.calls("cuEventRecord", with_lock=True) - records[1] == 2


SLICES = (("auto", "cuMemcpyBatchAsync", 1), ("off", "cuMemcpyAsync", 256))
"""for each setting: the driver call that copies, and the number of these calls in a slice"""


@pytest.mark.parametrize(("setting", "call", "calls"), SLICES)
def test_the_engines_thread_enqueues_a_large_load_one_slice_per_hook(
    emulator: Emulator, setting: str, call: str, calls: int
) -> None:
    bench = Bench(emulator, 50_000, batch_copies=setting)
    copier = CudaCopier(bench.driver)
    fence, before = copier.fence(), emulator.calls()
    ticket = copier.submit(Direction.LOAD, bench.load, (fence,))
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
    copier = CudaCopier(bench.driver)
    emulator.gate(bench.engine.stream)
    runs = bench.load if way is Direction.LOAD else bench.store
    tickets = [copier.submit(way, runs, (copier.fence(),)) for _ in range(3000 // pieces // 10 or 3)]
    for _ in range(20):
        assert tickets[0].query() is TicketState.PENDING
        assert elsewhere(tickets[0].query) is TicketState.PENDING
    emulator.open()
    for ticket in tickets:
        while elsewhere(ticket.query) is TicketState.PENDING:
            emulator.step()
    assert emulator.waits_with_lock == 0
    # a call without the GIL may wait for running copies
    assert emulator.waits == 0 or setting == "auto"
    assert (emulator.races, emulator.wrong, bench.has_arrived()) == (0, 0, True)


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_a_large_load_continues_although_later_loads_fill_the_queue(emulator: Emulator, setting: str) -> None:
    bench = Bench(emulator, 5000, batch_copies=setting)
    copier = CudaCopier(bench.driver)
    ticket = copier.submit(Direction.LOAD, bench.load, (copier.fence(),))
    states = {ticket.query()}
    for _ in range(50):
        for pieces in (200, *[10] * 30):
            copier.submit(Direction.LOAD, bench.load[:pieces], (copier.fence(),))
        for _ in range(3):
            emulator.step()
            states |= {ticket.query()} if TicketState.DONE not in states else set()
    assert TicketState.DONE in states
    assert (emulator.races, bench.has_arrived()) == (0, True)


def test_the_coroutines_query_enqueues_two_slices_and_a_hooks_query_does_not_wait_for_them(
    emulator: Emulator,
) -> None:
    bench = Bench(emulator, 50_000)
    ticket = CudaCopier(bench.driver).submit(Direction.LOAD, bench.load, ())
    submitted = emulator.calls("cuMemcpyBatchAsync")
    emulator.set_depth(10**6)  # This queue is so deep that the coroutine's calls do not wait.
    elsewhere(ticket.query)
    assert emulator.calls("cuMemcpyBatchAsync") - submitted == 2
    emulator.set_depth(1024)
    ticket.query()
    assert emulator.waits == 0


def test_a_fence_on_a_full_engine_stream_waits_without_the_gil(emulator: Emulator) -> None:
    bench = Bench(emulator)
    emulator.set_depth(4)
    emulator.gate(bench.engine.stream)
    copier = CudaCopier(bench.driver)
    for _ in range(6):
        copier.fence()
    assert emulator.waits == 3
    assert emulator.waits_with_lock == 0


def test_r9_after_a_refused_slice_no_slice_follows_and_the_batch_ends_after_the_earlier_ones(
    emulator: Emulator,
) -> None:
    bench = Bench(emulator, 10_000)
    copier = CudaCopier(bench.driver)
    emulator.fail("cuMemcpyBatchAsync", 2, after=2)
    ticket = copier.submit(Direction.LOAD, bench.load, ())
    assert elsewhere(ticket.query) is TicketState.PENDING
    assert emulator.calls("cuMemcpyBatchAsync") == 3  # three of five slices were enqueued
    assert elsewhere(ticket.query) is TicketState.PENDING
    emulator.step()
    assert ticket.query() is TicketState.FAILED
    assert emulator.calls("cuMemcpyBatchAsync") == 3


def test_a_refused_batch_names_the_copy_and_fails_after_its_accepted_copies(emulator: Emulator) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    emulator.limit_batches(3)
    with capture_logs() as logs:
        ticket = copier.submit(Direction.LOAD, bench.load, ())
    assert "copy 3 of 5 with CUDA_ERROR_OUT_OF_MEMORY (2)" in logs[0]["reason"]
    assert ticket.query() is TicketState.PENDING
    emulator.step()
    assert ticket.query() is TicketState.FAILED


def test_copies_of_unpinned_memory_are_refused(emulator: Emulator) -> None:
    bench = Bench(emulator)
    pageable = np.zeros(PIECE * 5, np.uint8)
    runs = CopyRuns(pageable.ctypes.data + np.arange(5) * PIECE, bench.load.target, bench.load.size)
    with pytest.raises(CopyError, match="copy 0 of 5 with CUDA_ERROR_INVALID_VALUE"):
        bench.driver.copy(Direction.LOAD, runs, bench.driver.stream(urgent=True))


def test_streams_are_created_with_the_devices_priorities(emulator: Emulator) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    priorities = {}
    for direction, stream in copier._streams.items():
        found = ctypes.c_int()
        emulator.lib.cuStreamGetPriority(ctypes.c_void_p(stream), ctypes.byref(found))
        priorities[direction] = found.value
    assert priorities == {Direction.LOAD: -5, Direction.STORE: 0}
    assert bench.engine.stream not in copier._streams.values()


def test_events_are_reused_when_their_batch_has_ended(emulator: Emulator) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    for _ in range(3):
        made = emulator.calls("cuEventCreate")
        tickets = [copier.submit(Direction.LOAD, bench.load, (copier.fence(),)) for _ in range(70)]
        assert {ticket.query() for ticket in tickets} == {TicketState.PENDING}
        emulator.step()
        assert {ticket.query() for ticket in tickets} == {TicketState.DONE}
        del tickets[:]
    assert emulator.calls("cuEventCreate") == made


def test_a_batchs_time_leaves_out_its_wait_for_the_fence(emulator: Emulator) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    bench.engine.write(0, 1, cost_s=100.0)
    ticket = copier.submit(Direction.STORE, bench.store, (copier.fence(),))
    assert ticket.copy_seconds is None
    emulator.step()
    assert ticket.query() is TicketState.DONE
    assert ticket.copy_seconds == pytest.approx(len(bench.store) * 1e-6, rel=0.1)


def test_a_batch_succeeds_even_if_its_time_is_unknown(emulator: Emulator) -> None:
    bench = Bench(emulator)
    ticket = CudaCopier(bench.driver).submit(Direction.LOAD, bench.load, ())
    emulator.step()
    emulator.fail("cuEventElapsedTime", 400)
    assert (ticket.query(), ticket.copy_seconds) == (TicketState.DONE, None)


def test_only_a_fence_reads_the_current_stream(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    fence = copier.fence()
    monkeypatch.delattr(bench.driver, "_current_stream")  # the coroutine's thread has another one
    ticket = elsewhere(lambda: copier.submit(Direction.STORE, bench.store, (fence,)))
    emulator.step()
    assert elsewhere(ticket.query) is TicketState.DONE


def test_copies_stay_pending_until_their_end_event_can_be_recorded(emulator: Emulator) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    emulator.fail(
        "cuEventRecord", 400, after=1, times=2
    )  # The start event is recorded. Recording the end event fails twice.
    ticket = copier.submit(Direction.LOAD, bench.load, ())
    with capture_logs() as logs:
        assert ticket.query() is TicketState.PENDING
    assert [entry["event"] for entry in logs] == ["copy_query_refused"]
    assert ticket.query() is TicketState.PENDING
    emulator.step()
    assert ticket.query() is TicketState.DONE


@pytest.mark.parametrize("code", [900, 400, 2])
def test_a_refused_query_does_not_end_the_batch(emulator: Emulator, code: int) -> None:
    bench = Bench(emulator)
    ticket = CudaCopier(bench.driver).submit(Direction.LOAD, bench.load, ())
    emulator.fail("cuEventQuery", code, times=3)
    with capture_logs() as logs:
        assert [ticket.query() for _ in range(3)] == [TicketState.PENDING] * 3
    assert len(logs) == 1
    emulator.step()
    assert ticket.query() is TicketState.DONE


@pytest.mark.parametrize("code", [700, 719, 999, 810, 46])
def test_a_lost_device_ends_every_batch(emulator: Emulator, code: int) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    ticket = copier.submit(Direction.LOAD, bench.load, ())
    emulator.lose(0, code)
    with pytest.raises(DeviceLost, match=rf"\({code}\)"):
        ticket.query()
    with pytest.raises(DeviceLost):
        copier.submit(Direction.LOAD, bench.load, ())
    copier.close()  # this must not raise


@pytest.mark.parametrize("code", [3, 201])
def test_a_query_that_always_fails_ends_the_batch(emulator: Emulator, code: int) -> None:
    bench = Bench(emulator)
    ticket = CudaCopier(bench.driver).submit(Direction.LOAD, bench.load, ())
    emulator.fail("cuEventQuery", code)
    with pytest.raises(DeviceLost, match=rf"\({code}\)"):
        ticket.query()


def test_drivers_before_cuda_12_do_not_use_batches(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as ctypes has it
            if name == "cuGetProcAddress_v2":
                raise AttributeError(name)
            return super().__getattr__(name)

    monkeypatch.setattr(ctypes, "CDLL", Old)
    assert CudaLibrary().batch_copy() is None


def test_a_query_during_a_capture_neither_fails_nor_breaks_it(emulator: Emulator) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    ticket = copier.submit(Direction.LOAD, bench.load, ())
    bench.engine.capture()
    assert elsewhere(ticket.query) is TicketState.PENDING
    emulator.step()
    assert elsewhere(ticket.query) is TicketState.DONE
    assert bench.engine.end_capture() == 0


def test_the_engines_thread_keeps_its_capture_mode(emulator: Emulator) -> None:
    bench = Bench(emulator)
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


def test_an_error_without_a_name_has_its_number(emulator: Emulator) -> None:
    bench = Bench(emulator)
    emulator.fail("cuMemHostRegister_v2", 12345)
    with pytest.raises(CudaError, match=r"cuMemHostRegister_v2 with an unknown error \(12345\)"):
        bench.driver.pinned(4096)


def test_scratch_memory_that_cannot_be_allocated_is_an_error(emulator: Emulator) -> None:
    bench = Bench(emulator)
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
    with pytest.raises(
        HostMemoryBusy, match=r"4096 bytes of host memory are not pinned: .*CAPTURE_UNSUPPORTED"
    ):
        pin.register(memory.ctypes.data, 4096)
    emulator.fail("cuMemHostRegister_v2", 2)
    with pytest.raises(HostMemoryError) as caught:
        pin.register(memory.ctypes.data, 4096)
    assert not isinstance(caught.value, HostMemoryBusy)


def test_memory_that_the_driver_does_not_release_stays_mapped(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(host_memory, "_KEPT", kept)
    allocator = MmapAllocator(ManualExecutor(held=False), CudaPin(Bench(emulator).driver))
    chunk = allocator._allocate(1 << 20)
    emulator.fail("cuMemHostUnregister", 2)
    with capture_logs() as logs:
        chunk.release()
    assert [entry["event"] for entry in logs] == ["host_memory_not_unpinned"]
    assert kept
    ctypes.memset(chunk.address, 1, 16)


def test_pinned_memory_is_released_on_the_executors_threads(emulator: Emulator) -> None:
    executor = ManualExecutor(held=False)
    allocator = MmapAllocator(executor, CudaPin(Bench(emulator).driver))
    chunk = allocator._allocate(1 << 20)
    before = emulator.calls("cuMemHostUnregister")
    executor.hold()
    chunk.release()
    assert emulator.calls("cuMemHostUnregister") == before
    executor.release()
    assert emulator.calls("cuMemHostUnregister") == before + 1


def test_closing_destroys_streams_and_events(emulator: Emulator) -> None:
    bench = Bench(emulator)
    copier = CudaCopier(bench.driver)
    copier.submit(Direction.LOAD, bench.load, (copier.fence(),))
    copier.close()
    assert emulator.calls("cuStreamDestroy_v2") == 2
    emulator.step()
    assert bench.has_arrived()  # work that was already enqueued on a stream still runs
