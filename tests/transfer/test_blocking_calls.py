from __future__ import annotations

import _thread
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvoffload.logs import get_logger
from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError, RemoteGone
from kvoffload.model.ids import BlockKey
from kvoffload.remote.store import RemoteStore
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.testing import FakeClock
from kvoffload.transfer import blocking_calls
from kvoffload.transfer.blocking_calls import BlockingCalls, Call, ErrorRow
from kvoffload.transfer.remote import remote_calls
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor, ThreadGate
from tests.remote.fake_store import FakeStore

if TYPE_CHECKING:
    import pytest

TIMEOUT_S = 2.0
KEY = BlockKey(b"a key")


class Rig:
    """The blocking calls of one side, on an executor that the test runs."""

    def __init__(self, executor: ManualExecutor | DaemonExecutor | None = None) -> None:
        self.clock = FakeClock()
        self.store = FakeStore()
        self.executor = executor or ManualExecutor()
        self.refuses, self.connections = False, 0
        self.calls = remote_calls(self._connect, self.executor, self.clock.monotonic, TIMEOUT_S)
        self.answers: list[object] = []

    def _connect(self) -> RemoteStore:
        if self.refuses:
            raise RemoteError("refused")
        self.connections += 1
        return self.store

    def call(self, name: str = "kvo1/name", *, is_write: bool = False, use: Callable | None = None) -> None:
        self.calls.submit(lambda _, store: store.read(name) or b"none", self._ended, use, is_write=is_write)

    def _ended(self, call: Call) -> None:
        self.answers.append(call.result)

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, then run queued calls."""
        self.clock.jump(seconds)
        self.calls.poll()
        assert isinstance(self.executor, ManualExecutor)
        self.executor.run_all()
        self.calls.poll()

    def pause(self) -> int:
        """Let the remote tier work again; return after how many seconds calls are made again."""
        self.store.fails, seconds = False, 0
        while not self.calls.works:
            self.turn(1.0)
            seconds += 1
        return seconds

    def open(self) -> None:
        self.turn()
        assert self.calls.works
        self.store.calls.clear()


def test_no_call_is_made_before_a_probe_has_worked() -> None:
    rig = Rig()
    rig.call()
    rig.turn()
    assert rig.answers == [None]
    assert rig.calls.works
    rig.call()
    rig.turn()
    assert rig.answers == [None, b"none"]


def test_three_failures_in_a_row_open_the_breaker_and_pauses_between_probes_grow() -> None:
    rig = Rig()
    rig.open()
    rig.store.fails = True
    for number in range(3):
        assert rig.calls.works, number
        rig.call()
        rig.turn()
    assert not rig.calls.works
    rig.store.calls.clear()
    for _ in range(100):
        rig.call()
    rig.turn()
    assert rig.store.calls == []
    probes = []
    for second in range(1, 16):
        rig.turn(1.0)
        probes += [second] * len(rig.store.calls)
        rig.store.calls.clear()
    assert probes == [1, 3, 7, 15]
    assert rig.answers == [None] * 103


def test_failures_are_counted_by_kind() -> None:
    rig = Rig()
    rig.refuses = True
    rig.turn()
    rig.refuses = False
    rig.turn(1.0)
    rig.calls.submit(raising(RemoteError("the test says so", RemoteFault.DENIED)), rig._ended)
    rig.calls.submit(raising(ValueError()), rig._ended)
    rig.turn()
    rig.call()  # the breaker is open, so this call is never made
    rig.calls.close()
    counted = {fault: number for fault, number in rig.calls.faults.items() if number}
    assert counted == {RemoteFault.OTHER: 2, RemoteFault.DENIED: 1}


def raising(error: Exception) -> Callable[[Call, RemoteStore], object]:
    def work(_: Call, __: RemoteStore) -> object:
        raise error

    return work


def test_failures_between_successes_do_not_open_the_breaker() -> None:
    rig = Rig()
    rig.open()
    for _ in range(3):
        for rig.store.fails in (True, True, False):
            rig.call()
            rig.turn()
    assert rig.calls.works


def test_a_store_that_only_answers_probes_gets_single_calls_with_growing_pauses() -> None:
    rig = Rig()
    rig.open()
    pauses, calls = [], []
    for _ in range(3):
        rig.store.fails = True
        rig.store.calls.clear()
        for _ in range(3):
            rig.call()
            rig.turn()
        calls.append(len(rig.store.calls))
        pauses.append(rig.pause())
    assert (calls, pauses) == ([3, 1, 1], [1, 2, 4])


def test_successful_writes_neither_hide_failing_reads_nor_end_the_trial() -> None:
    rig = Rig()
    rig.open()
    pauses: list[int] = []
    for _ in range(3):
        while rig.calls.works:
            rig.store.fails = False
            rig.call(is_write=True)
            rig.turn()
            rig.store.fails = True
            rig.call()
            rig.turn()
        pauses.append(rig.pause())
    assert pauses == [1, 2, 4]
    assert rig.answers == [b"none", None] * 5


def test_a_failing_store_takes_at_most_a_fifth_of_the_time() -> None:
    rig = Rig()
    rig.open()
    calls_s = [0.5, 0.75, 1.5]

    def fail(_: Call, __: RemoteStore) -> None:
        rig.clock.jump(calls_s.pop(0))
        raise RemoteError("none of it arrives")

    for _ in range(3):
        rig.calls.submit(fail, rig._ended)
        rig.turn()
    assert not rig.calls.works
    rig.turn(5.9)
    assert not rig.calls.works
    rig.turn(0.1)
    assert rig.calls.works


def test_an_answer_after_the_probe_ends_the_trial() -> None:
    rig = Rig()
    rig.open()
    rig.store.fails = True
    for _ in range(3):
        rig.call()
        rig.turn()
    rig.store.fails = False
    rig.turn(1.0)
    rig.call()
    rig.turn()
    rig.store.fails = True
    for _ in range(2):
        rig.call()
        rig.turn()
    assert rig.calls.works


def test_the_end_of_a_connection_opens_the_breaker_and_a_probe_connects_again() -> None:
    def end(_: Call, __: RemoteStore) -> None:
        raise RemoteGone("its process has ended")

    rig = Rig()
    rig.open()
    for _ in range(3):
        rig.calls.submit(end, rig._ended)
    with capture_logs() as lines:
        rig.turn()
        assert not rig.calls.works
        rig.turn(0.9)
        assert rig.connections == 1
        rig.turn(0.1)
    assert rig.connections == 2
    assert rig.calls.works
    assert rig.answers == [None] * 3
    assert [line["event"] for line in lines] == ["remote_fails", "remote_works"]


def test_a_connection_may_take_longer_than_a_call() -> None:
    rig, gate, connect = Rig(DaemonExecutor("calls", 2)), ThreadGate(), Rig._connect

    def late() -> RemoteStore:
        gate.arrive()
        return connect(rig)

    rig.calls._connect = late
    rig.calls.poll()
    gate.wait_for_arrivals(1)
    for _ in range(5):
        rig.clock.jump(TIMEOUT_S)
        rig.calls.poll()
    gate.open()
    while not rig.calls.works:
        rig.calls.poll()
    assert (gate.arrivals, rig.connections) == (1, 1)
    rig.calls.close()


def test_queued_reads_are_made_before_queued_writes() -> None:
    rig = Rig()
    rig.open()
    rig.store.values.update({"write": b"write", "read": b"read"})
    rig.call("write", is_write=True)
    rig.call("read")
    rig.turn()
    assert rig.answers == [b"read", b"write"]


def test_a_call_that_waits_too_long_in_the_queue_fails_without_counting_as_a_store_failure() -> None:
    rig = Rig()
    rig.open()
    rig.call()
    rig.clock.jump(TIMEOUT_S)
    rig.turn()
    assert rig.answers == [None]
    assert rig.store.calls == []
    assert rig.calls.works


def test_a_hanging_call_fails_in_time_and_its_late_result_is_not_used() -> None:
    rig = Rig(DaemonExecutor("calls", 2))
    rig.calls.poll()
    while not rig.calls.works:
        rig.calls.poll()
    rig.store.gate = gate = ThreadGate()
    used: list[object] = []
    rig.call(use=used.append)
    gate.wait_for_arrivals(1)
    rig.clock.jump(TIMEOUT_S)
    rig.calls.poll()
    assert rig.answers == [None]
    assert not rig.calls.works
    rig.store.gate = None
    gate.open()
    while rig.calls._active:
        pass
    rig.calls.poll()
    assert (rig.answers, used) == ([None], [])
    rig.clock.jump(4 * TIMEOUT_S)
    while not rig.calls.works:
        rig.calls.poll()
    rig.calls.close()


def test_a_client_that_panics_fails_its_call_at_once() -> None:
    class PanicError(BaseException):
        """Stands for a panic in a client that is written in Rust."""

    def panic(_: Call, __: RemoteStore) -> None:
        raise PanicError

    rig = Rig()
    rig.open()
    rig.calls.submit(panic, rig._ended)
    rig.turn()
    assert rig.answers == [None]
    assert not rig.calls._active
    assert rig.calls.works


def test_close_does_not_wait_and_the_connection_is_closed_after_the_last_call() -> None:
    rig = Rig()
    rig.open()
    rig.call()
    rig.calls.close()
    assert rig.answers == [None]
    assert isinstance(rig.executor, ManualExecutor)
    rig.executor.run_all()
    assert rig.store.is_closed
    assert not rig.calls.works


def test_the_call_that_ends_last_closes_the_connection() -> None:
    rig = Rig(DaemonExecutor("calls", 2))
    while not rig.calls.works:
        rig.calls.poll()
    rig.store.gate = gate = ThreadGate()
    rig.call()
    gate.wait_for_arrivals(1)
    rig.calls.close()
    assert not rig.store.is_closed
    gate.open()
    while not rig.store.is_closed:
        os.sched_yield()


def test_a_call_taken_while_the_connection_is_closed_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.open()
    rig.call()

    def close() -> float:
        rig.calls.close()  # The thread has taken the call, but has not yet listed the call as active.
        return 0.0

    monkeypatch.setattr(rig.calls, "_monotonic", close)
    assert isinstance(rig.executor, ManualExecutor)
    rig.executor.run_all()
    assert rig.store.calls == []
    assert rig.store.is_closed


def test_the_exit_waits_once_for_all_calls_except_hanging_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, float]] = []
    monkeypatch.setattr(
        blocking_calls, "wait", lambda running, seconds: waits.append((len(running), seconds))
    )
    rigs = [Rig() for _ in range(3)]
    monkeypatch.setattr(blocking_calls, "_MADE", [rig.calls for rig in rigs])
    for rig in rigs:
        rig.open()
        rig.call()
    rigs[0].calls._active[0] = stuck = Call(lambda _, __: None, None, lambda _: None, 0.0, 1.0)
    stuck.is_stuck = True
    blocking_calls._exit()
    assert waits == [(2, blocking_calls._EXIT_S)]
    assert not any(rig.calls.works for rig in rigs)


def test_the_exit_waits_until_threads_of_a_client_have_left_python(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, pauses = ThreadGate(), list[int]()
    real = blocking_calls._foreign_threads
    others = real()  # the test runner may have started other threads
    monkeypatch.setattr(blocking_calls, "_foreign_threads", lambda: real() - others)

    def pause(_: float) -> None:
        pauses.append(len(blocking_calls._foreign_threads()))
        gate.open()

    monkeypatch.setattr("time.sleep", pause)
    monkeypatch.setattr(blocking_calls, "_MADE", [Rig().calls])
    # This thread is unknown to `threading`, like a native client's own threads.
    _thread.start_new_thread(gate.arrive, ())
    gate.wait_for_arrivals(1)
    blocking_calls._exit()
    assert pauses[0] == 1
    assert not blocking_calls._foreign_threads()


class DiskRig:
    """Calls to a disk whose operations are functions given by the test."""

    def __init__(self, executor: ManualExecutor | DaemonExecutor | None = None) -> None:
        self.clock = FakeClock()
        self.executor = executor or ManualExecutor(held=False)
        self.opening: list[Exception] = []
        self.closed = 0
        self.policy = ErrorRow(get_logger("disk"))
        self.calls: BlockingCalls[DiskRig] = BlockingCalls(
            self._open, self.executor, self.clock.monotonic, self.policy, TIMEOUT_S
        )
        self.ended: list[Call] = []

    def _open(self) -> DiskRig:
        if self.opening:
            raise self.opening.pop()
        return self

    def close(self) -> None:
        self.closed += 1

    def opened(self) -> DiskRig:
        while not self.calls.works:
            self.calls.poll()
        return self

    def call(self, work: Callable[[], object] = lambda: None, **options: Any) -> None:  # noqa: ANN401
        self.calls.submit(lambda _, __: work(), self.ended.append, **options)
        self.calls.poll()


def fail() -> None:
    raise OSError("the test says so")


def test_a_disk_that_cannot_be_opened_is_not_tried_again() -> None:
    rig = DiskRig()
    rig.opening = [OSError("no"), OSError("no")]
    for _ in range(3):
        rig.clock.jump(100.0)
        rig.calls.poll()
    assert (len(rig.opening), rig.calls.works, rig.policy.is_opening) == (1, False, False)


def test_a_disk_is_closed_after_eight_errors_in_a_row() -> None:
    rig = DiskRig().opened()
    with capture_logs() as lines:
        for work in [fail] * 7 + [lambda: None] + [fail] * 7:
            rig.call(work)
        assert rig.calls.works
        rig.call(fail)
        rig.clock.jump(1000.0)
        rig.call()
    assert not rig.calls.works
    assert (rig.ended[-1].was_made, len(rig.ended)) == (False, 17)
    assert [line["in_a_row"] for line in lines if line["event"] == "disk_call_failed"] == [
        *range(1, 8),
        *range(1, 9),
    ]
    assert [line["event"] for line in lines].count("disk_stopped") == 1


def test_a_hanging_disk_call_stops_other_calls_until_it_returns() -> None:
    rig, gate = DiskRig(DaemonExecutor("calls", 2)).opened(), ThreadGate()
    with capture_logs() as lines:
        rig.call(gate.arrive, job=7)
        gate.wait_for_arrivals(1)
        rig.clock.jump(TIMEOUT_S)
        rig.calls.poll()
        rig.call()
        assert [(call.is_stuck, call.was_made) for call in rig.ended] == [(True, True), (False, False)]
        gate.open()
        while not rig.calls.works:
            os.sched_yield()
    rig.calls.poll()
    assert len(rig.ended) == 2
    assert [(line["event"], line.get("job")) for line in lines] == [
        ("disk_call_hangs", 7),
        ("disk_call_returned", None),
    ]
    rig.calls.close()


def test_cancelled_reads_are_not_started_and_not_counted() -> None:
    rig = DiskRig(ManualExecutor())
    rig.calls.poll()
    assert isinstance(rig.executor, ManualExecutor)
    rig.executor.run_all()
    rig.opened()
    made: list[int] = []
    for job in (1, 2):
        rig.call(lambda job=job: made.append(job), job=job)  # type: ignore[misc]
    rig.calls.cancel([1])
    rig.executor.run_all()
    rig.calls.poll()
    assert made == [2]
    assert [(call.job, call.was_made, call.error) for call in rig.ended] == [
        (1, False, None),
        (2, True, None),
    ]


def test_a_file_may_take_any_time_to_open() -> None:
    rig, gate = DiskRig(DaemonExecutor("calls", 1)), ThreadGate()
    opened = rig.calls._connect

    def late() -> DiskRig:
        gate.arrive()
        return opened()

    rig.calls._connect = late
    rig.calls.poll()
    gate.wait_for_arrivals(1)
    rig.clock.jump(1000.0)
    rig.calls.poll()
    gate.open()
    rig.opened()
    rig.calls.close()
