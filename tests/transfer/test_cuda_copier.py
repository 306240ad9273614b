from __future__ import annotations

import threading

import numpy as np
import pytest

from kvoffload.model.errors import DeviceLost
from kvoffload.model.wire import Direction
from kvoffload.transfer.cuda.copier import CudaCopier
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.captured_logs import capture_logs
from tests.transfer.fake_cuda import FakeCuda


class Bench:
    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.copier = CudaCopier(self.cuda)  # type: ignore[arg-type]  # it has what the copier calls
        self.loads, self.stores = self.cuda.streams
        self.source = np.arange(32, dtype=np.uint8)
        self.target = np.zeros_like(self.source)

    def runs(self) -> CopyRuns:
        starts, sizes = np.array([0, 16], np.int64), np.array([16, 16], np.int64)
        return CopyRuns(self.source.ctypes.data + starts, self.target.ctypes.data + starts, sizes)


def test_a_copy_waits_for_the_fence_and_no_thread_waits_for_the_copy() -> None:
    bench = Bench()
    bench.cuda.main.operations.append(("kernel", None))
    ticket = bench.copier.submit(Direction.STORE, bench.runs(), (bench.copier.fence(),))
    bench.cuda.run(bench.stores)
    assert ticket.query() is TicketState.PENDING
    assert not bench.target.any()
    bench.cuda.run(bench.cuda.main)
    bench.cuda.run(bench.stores)
    assert ticket.query() is TicketState.DONE
    assert (bench.target == bench.source).all()


def test_the_measured_time_leaves_out_the_wait() -> None:
    bench = Bench()
    ticket = bench.copier.submit(Direction.STORE, bench.runs(), (bench.copier.fence(),))
    bench.cuda.time = 100.0
    bench.cuda.run(bench.cuda.main)
    bench.cuda.run(bench.stores)
    assert ticket.copy_seconds is None
    ticket.query()
    assert ticket.copy_seconds == 2.0  # the copy and the end event take one second each


def test_loads_and_stores_use_separate_streams() -> None:
    bench = Bench()
    assert (bench.loads.urgent, bench.stores.urgent) == (True, False)
    load = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    store = bench.copier.submit(Direction.STORE, bench.runs(), ())
    bench.cuda.run(bench.loads)
    assert (load.query(), store.query()) == (TicketState.DONE, TicketState.PENDING)


def test_only_a_fence_reads_the_current_stream() -> None:
    bench = Bench()
    fence = bench.copier.fence()
    ended: list[TicketState] = []

    def coroutine_thread() -> None:
        ticket = bench.copier.submit(Direction.STORE, bench.runs(), (fence,))
        bench.cuda.run(bench.cuda.main)
        bench.cuda.run(bench.stores)
        ended.append(ticket.query())

    thread = threading.Thread(target=coroutine_thread)
    thread.start()
    thread.join()
    assert ended == [TicketState.DONE]
    assert bench.cuda.current_asked_by == [threading.get_ident()]


def test_a_refused_batch_fails_only_after_its_enqueued_copies() -> None:
    bench = Bench()
    bench.cuda.refuse_copy = True
    with capture_logs() as logs:
        ticket = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    assert [entry["event"] for entry in logs] == ["copy_refused"]
    assert ticket.query() is TicketState.PENDING
    bench.cuda.run(bench.loads)
    assert ticket.query() is TicketState.FAILED


def test_an_error_of_the_device_is_raised() -> None:
    bench = Bench()
    ticket = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    bench.cuda.device_error = True
    with pytest.raises(DeviceLost, match="illegal memory access"):
        ticket.query()


def test_a_job_succeeds_even_if_its_duration_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    ticket = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    bench.cuda.run(bench.loads)
    monkeypatch.delattr(FakeCuda, "seconds_between")
    assert (ticket.query(), ticket.copy_seconds) == (TicketState.DONE, None)
