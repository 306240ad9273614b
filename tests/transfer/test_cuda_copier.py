"""The order in which the CUDA copier enqueues, against a fake device that runs streams one operation at a time."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvoffload.model.errors import CopyError
from kvoffload.model.transfer import Direction
from kvoffload.testing.logs import capture_logs
from kvoffload.transfer.cuda_copier import CudaCopier
from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns


@dataclass(eq=False)
class Event:
    timed: bool
    passed_at: float | None = None


@dataclass(eq=False)
class Stream:
    urgent: bool
    operations: deque[tuple[str, object]] = field(default_factory=deque)


class FakeCuda:
    """One device: nothing runs before `run`, which stops at an event that has not passed."""

    def __init__(self) -> None:
        self.main = Stream(urgent=False)
        self.streams: list[Stream] = []
        self.events = 0
        self.time = 0.0
        self.current_asked_by: list[int] = []
        self.refuse_copy = False
        self.device_error = False

    def stream(self, *, urgent: bool) -> Stream:
        self.streams.append(Stream(urgent))
        return self.streams[-1]

    def event(self, *, timed: bool) -> Event:
        self.events += 1
        return Event(timed)

    def record_current(self, event: Event) -> None:
        self.current_asked_by.append(threading.get_ident())
        self.record(event, self.main)

    def record(self, event: Event, stream: Stream) -> None:
        event.passed_at = None
        stream.operations.append(("record", event))

    def wait(self, stream: Stream, event: Event) -> None:
        stream.operations.append(("wait", event))

    def has_passed(self, event: Event) -> bool:
        if self.device_error:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return event.passed_at is not None

    def seconds_between(self, start: Event, end: Event) -> float:
        assert start.timed
        assert end.timed
        assert start.passed_at is not None
        assert end.passed_at is not None
        return end.passed_at - start.passed_at

    def copy(self, direction: Direction, runs: CopyRuns, stream: Stream) -> None:
        if self.refuse_copy:
            half = CopyRuns(runs.source[:1], runs.target[:1], runs.size[:1])
            stream.operations.append(("copy", half))
            raise CopyError("refused")
        stream.operations.append(("copy", runs))

    def run(self, stream: Stream, operations: int = 1000) -> None:
        while stream.operations and operations > 0:
            kind, what = stream.operations[0]
            if kind == "wait" and isinstance(what, Event) and what.passed_at is None:
                return
            stream.operations.popleft()
            operations -= 1
            self.time += 1.0
            if isinstance(what, Event) and kind == "record":
                what.passed_at = self.time
            if isinstance(what, CopyRuns):
                copy_by_memmove(what)


class Bench:
    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.copier = CudaCopier(self.cuda)
        self.loads, self.stores = self.cuda.streams
        self.source = np.arange(32, dtype=np.uint8)
        self.target = np.zeros_like(self.source)

    def runs(self) -> CopyRuns:
        starts, sizes = np.array([0, 16], np.int64), np.array([16, 16], np.int64)
        return CopyRuns(self.source.ctypes.data + starts, self.target.ctypes.data + starts, sizes)


def test_a_copy_waits_for_the_fence_and_nobody_waits_for_the_copy() -> None:
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
    assert ticket.copy_seconds == 2.0  # the copy and the end event, one second each


def test_loads_and_stores_have_streams_of_their_own() -> None:
    bench = Bench()
    assert (bench.loads.urgent, bench.stores.urgent) == (True, False)
    load = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    store = bench.copier.submit(Direction.STORE, bench.runs(), ())
    bench.cuda.run(bench.loads)
    assert (load.query(), store.query()) == (TicketState.DONE, TicketState.PENDING)


def test_only_a_fence_asks_for_the_current_stream() -> None:
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


def test_events_are_used_again_after_their_batch_and_not_before() -> None:
    bench = Bench()
    first = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    bench.copier.submit(Direction.LOAD, bench.runs(), ())
    assert bench.cuda.events == 4
    bench.cuda.run(bench.loads, 3)
    assert first.query() is TicketState.DONE
    bench.copier.submit(Direction.LOAD, bench.runs(), ())
    assert bench.cuda.events == 4
    bench.copier.close()


def test_a_refused_batch_fails_only_when_what_was_enqueued_has_ended() -> None:
    """The driver may have taken some of the copies: their memory is not free before they have run."""
    bench = Bench()
    bench.cuda.refuse_copy = True
    with capture_logs() as logs:
        ticket = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    assert [entry["event"] for entry in logs] == ["copy_refused"]
    assert ticket.query() is TicketState.PENDING
    bench.cuda.run(bench.loads)
    assert ticket.query() is TicketState.FAILED


def test_a_device_in_error_raises() -> None:
    bench = Bench()
    ticket = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    bench.cuda.device_error = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ticket.query()


def test_a_duration_that_cannot_be_had_does_not_cost_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    ticket = bench.copier.submit(Direction.LOAD, bench.runs(), ())
    bench.cuda.run(bench.loads)
    monkeypatch.delattr(FakeCuda, "seconds_between")
    assert (ticket.query(), ticket.copy_seconds) == (TicketState.DONE, None)
