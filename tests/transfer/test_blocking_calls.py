"""Tests what `BlockingCalls` promises for a disk and for a remote tier, and what each of their policies adds."""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvoffload.logs import get_logger
from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError, RemoteGone
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.testing import FakeClock
from kvoffload.transfer import blocking_calls
from kvoffload.transfer.blocking_calls import PROBE, BlockingCalls, Breaker, Call, ErrorRow
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor, ThreadGate

TIMEOUT_S = 2.0


class Rig:
    """A resource of one kind, and the calls to it. By default, the test runs them with `turn`.

    Attributes:
        opening, probing: called when the resource is opened or a remote tier is probed; they may raise.
        openings, closings, probes: how often the resource was opened, closed and probed.
        fails: whether probes and calls by name fail.
        made: the names of the calls that were made.
        ended: the calls that have ended.
    """

    def __init__(self, kind: str, executor: DaemonExecutor | None = None) -> None:
        self.clock = FakeClock()
        self.opening: Callable[[], object] = lambda: None
        self.probing: Callable[[], object] = lambda: None
        self.openings = self.closings = self.probes = 0
        self.fails = False
        self.made: list[str] = []
        self.ended: list[Call] = []
        self._manual = ManualExecutor()
        self.policy = ErrorRow(get_logger("disk")) if kind == "disk" else Breaker(get_logger("remote"))
        self.calls: BlockingCalls[Rig] = BlockingCalls(
            self._open, executor or self._manual, self.clock.monotonic, self.policy, TIMEOUT_S
        )

    def _open(self) -> Rig:
        self.opening()
        self.openings += 1
        return self

    def close(self) -> None:
        self.closings += 1

    def read(self, name: str) -> str:
        if name == PROBE:
            self.probes += 1
            self.probing()
        else:
            self.made.append(name)
        if self.fails:
            raise RemoteError("the test says so")
        return name

    def call(self, name: str = "", does: Callable[[], object] | None = None, **options: Any) -> None:  # noqa: ANN401
        """Submit a call by name, or one that calls `does`."""
        self.calls.submit(
            lambda _, resource: resource.read(name) if does is None else does(), self.ended.append, **options
        )

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, then run queued calls."""
        self.clock.jump(seconds)
        self.calls.poll()
        self._manual.run_all()
        self.calls.poll()

    def opened(self) -> Rig:
        self.wait_until(lambda: self.calls.works)
        self.probes = 0
        return self

    def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.turn()
            os.sched_yield()

    @property
    def results(self) -> list[object]:
        return [call.result for call in self.ended]


def raising(error: BaseException) -> Callable[..., object]:
    def work(*_: object) -> object:
        raise error

    return work


# -- every resource -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "remote"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig(kind: str) -> Rig:
    return Rig(kind).opened()


@pytest.fixture
def threaded(kind: str) -> Iterator[Rig]:
    """Yield a rig whose calls run on two threads."""
    rig = Rig(kind, DaemonExecutor("calls", 2)).opened()
    yield rig
    rig.calls.close()


def test_no_call_is_made_before_a_probe_has_opened_the_resource(kind: str) -> None:
    rig = Rig(kind)
    rig.call("early")
    rig.turn()
    rig.call("later")
    rig.turn()
    assert (rig.results, rig.made) == ([None, "later"], ["later"])


def test_opening_may_take_longer_than_a_call(kind: str) -> None:
    rig = Rig(kind)

    def opening() -> None:
        rig.clock.jump(1000.0 if kind == "disk" else 5 * TIMEOUT_S)
        rig.calls.poll()

    rig.opening, rig.probing = opening, rig.calls.poll
    rig.turn()
    assert (rig.openings, rig.calls.works) == (1, True)


def test_reads_are_made_before_writes_and_not_at_all_if_cancelled(rig: Rig) -> None:
    rig.call("write", is_write=True)
    for job in (1, 2):
        rig.call(f"read {job}", job=job)
    rig.calls.cancel([1])
    rig.turn()
    ends = [(call.was_made, call.result) for call in rig.ended]
    assert ends == [(False, None), (True, "read 2"), (True, "write")]
    assert rig.made == ["read 2", "write"]


@pytest.mark.parametrize(("kind", "made"), [("disk", ["a call"]), ("remote", [])])
def test_only_a_file_is_called_after_a_long_wait_in_the_queue(rig: Rig, made: list[str]) -> None:
    rig.call("a call")
    rig.turn(TIMEOUT_S)
    assert (rig.made, len(rig.ended), rig.calls.works) == (made, 1, True)


def test_every_call_ends_whether_threads_are_idle_or_busy(threaded: Rig) -> None:
    for number in range(200):
        threaded.call(str(number), is_write=number % 2 == 0)
        if number % 3 == 0:
            threaded.wait_until(lambda count=number + 1: len(threaded.ended) == count)  # type: ignore[misc]
    threaded.wait_until(lambda: len(threaded.ended) == 200)
    assert sorted(threaded.made, key=int) == [str(number) for number in range(200)]


def test_an_exception_in_any_part_of_a_call_fails_only_this_call(rig: Rig, kind: str) -> None:
    class PanicError(BaseException):
        """Stands for a panic in a client that is written in Rust."""

    rig.call(does=raising(PanicError("work")))
    rig.call(use=raising(ValueError("use")))
    rig.call(does=raising(RemoteError("ours")), is_write=True)
    rig.call("another")
    rig.turn()
    # The text of a foreign exception may repeat what a remote server wrote, so only its class is used.
    texts = {"disk": ["work", "use"], "remote": ["PanicError", "ValueError"]}[kind]
    ends = [(call.result, call.error) for call in rig.ended]
    assert ends == [(None, texts[0]), (None, texts[1]), ("another", None), (None, "ours")]
    assert not rig.calls._active
    assert rig.calls.works


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("disk", ["disk_call_hangs", "disk_call_returned"]),
        ("remote", ["remote_fails", "remote_call_returned", "remote_works"]),
    ],
)
def test_a_hanging_call_fails_in_time_stops_other_calls_and_its_late_result_is_dropped(
    threaded: Rig, events: list[str]
) -> None:
    rig, gate, used = threaded, ThreadGate(), list[object]()
    with capture_logs() as lines:
        rig.call(does=gate.arrive, use=used.append)
        gate.wait_for_arrivals(1)
        rig.turn(0.9 * TIMEOUT_S)
        assert rig.ended == []
        rig.turn(0.1 * TIMEOUT_S)
        rig.call("meanwhile")
        rig.turn()
        assert [(call.is_stuck, call.was_made) for call in rig.ended] == [(True, True), (False, False)]
        assert (rig.ended[0].took, rig.calls.works) == (TIMEOUT_S, False)
        assert rig.calls.faults[RemoteFault.TIMEOUT] == 1
        gate.open()
        rig.wait_until(lambda: not rig.calls._active)
        rig.clock.jump(4 * TIMEOUT_S)
        rig.opened()
    assert (len(rig.ended), used) == (2, [])
    assert [line["event"] for line in lines] == events


def test_closing_does_not_wait_and_the_call_that_ends_last_closes_the_resource(threaded: Rig) -> None:
    rig, gate, used = threaded, ThreadGate(), list[object]()
    for _ in range(2):
        rig.call(does=gate.arrive, use=used.append)
    gate.wait_for_arrivals(2)
    rig.call("queued")
    rig.calls.close()
    assert (rig.results, rig.made, rig.closings) == ([None], [], 0)
    gate.open()
    rig.wait_until(lambda: bool(rig.closings))
    assert (len(rig.ended), used, rig.closings) == (1, [], 1)
    assert not rig.calls.works


def test_closing_closes_an_idle_resource(rig: Rig) -> None:
    rig.calls.close()
    rig._manual.run_all()
    assert rig.closings == 1


def test_a_call_taken_while_the_resource_is_closed_is_not_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.call("late")

    def close() -> float:
        rig.calls.close()  # The thread has taken the call, but has not yet listed the call as active.
        return 0.0

    monkeypatch.setattr(rig.calls, "_monotonic", close)
    rig._manual.run_all()
    assert (rig.made, rig.closings) == ([], 1)


def test_the_exit_waits_once_for_all_calls_except_hanging_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, float]] = []
    monkeypatch.setattr(blocking_calls, "wait", lambda calls, seconds: waits.append((len(calls), seconds)))
    rigs = [Rig("remote").opened() for _ in range(3)]
    monkeypatch.setattr(blocking_calls, "_MADE", [rig.calls for rig in rigs])
    for rig in rigs:
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
    monkeypatch.setattr(blocking_calls, "_MADE", [Rig("remote").calls])
    # This thread is unknown to `threading`, like a native client's own threads.
    _thread.start_new_thread(gate.arrive, ())
    gate.wait_for_arrivals(1)
    blocking_calls._exit()
    assert pauses[0] == 1
    assert not blocking_calls._foreign_threads()


# -- the breaker of a remote tier ---------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Rig:
    return Rig("remote").opened()


def fail(rig: Rig, times: int) -> None:
    rig.fails = True
    for _ in range(times):
        rig.call("fails")
        rig.turn()


def succeed(rig: Rig, *, is_write: bool = False) -> None:
    rig.fails = False
    rig.call("works", is_write=is_write)
    rig.turn()


def pause(rig: Rig) -> int:
    """Let the remote tier work again; return after how many seconds calls are made again."""
    rig.fails, seconds = False, 0
    while not rig.calls.works:
        rig.turn(1.0)
        seconds += 1
    return seconds


def test_three_failures_in_a_row_open_the_breaker_and_pauses_between_probes_grow(remote: Rig) -> None:
    fail(remote, 2)
    assert remote.calls.works
    fail(remote, 101)
    assert not remote.calls.works
    probes = list[int]()
    for second in range(1, 16):
        before = remote.probes
        remote.turn(1.0)
        probes += [second] * (remote.probes - before)
    assert probes == [1, 3, 7, 15]
    assert len(remote.made) == 3
    assert remote.results == [None] * 103


def test_failures_between_successes_do_not_open_the_breaker(remote: Rig) -> None:
    for _ in range(3):
        fail(remote, 2)
        succeed(remote)
    assert remote.calls.works


def test_a_store_that_only_answers_probes_gets_single_calls_with_growing_pauses(remote: Rig) -> None:
    calls, pauses = [], []
    for _ in range(3):
        remote.made.clear()
        fail(remote, 3)
        calls.append(len(remote.made))
        pauses.append(pause(remote))
    assert (calls, pauses) == ([3, 1, 1], [1, 2, 4])


def test_successful_writes_neither_hide_failing_reads_nor_end_the_trial(remote: Rig) -> None:
    pauses: list[int] = []
    for _ in range(3):
        while remote.calls.works:
            succeed(remote, is_write=True)
            fail(remote, 1)
        pauses.append(pause(remote))
    assert pauses == [1, 2, 4]
    assert remote.results == ["works", None] * 5


def test_an_answer_after_the_probe_ends_the_trial(remote: Rig) -> None:
    fail(remote, 3)
    pause(remote)
    succeed(remote)
    fail(remote, 2)
    assert remote.calls.works


def test_a_failing_store_takes_at_most_a_fifth_of_the_time(remote: Rig) -> None:
    def fail_after(seconds: float) -> None:
        remote.clock.jump(seconds)
        raise RemoteError("none of it arrives")

    for seconds in (0.5, 0.75, 1.5):
        remote.call(does=lambda seconds=seconds: fail_after(seconds))  # type: ignore[misc]
        remote.turn()
    assert not remote.calls.works
    remote.turn(5.9)
    assert not remote.calls.works
    remote.turn(0.1)
    assert remote.calls.works


def test_the_end_of_a_connection_opens_the_breaker_and_a_probe_connects_again(remote: Rig) -> None:
    for _ in range(3):
        remote.call(does=raising(RemoteGone("its process has ended")))
    with capture_logs() as lines:
        remote.turn()
        assert not remote.calls.works
        remote.turn(0.9)
        assert remote.openings == 1
        remote.turn(0.1)
    assert (remote.openings, remote.calls.works, remote.results) == (2, True, [None] * 3)
    assert [line["event"] for line in lines] == ["remote_fails", "remote_works"]


def test_failures_are_counted_by_kind() -> None:
    rig = Rig("remote")
    rig.opening = raising(RemoteError("refused"))
    rig.turn()
    rig.opening = lambda: None
    rig.turn(1.0)
    rig.call(does=raising(RemoteError("the test says so", RemoteFault.DENIED)))
    rig.call(does=raising(ValueError()))
    rig.turn()
    rig.call()  # the breaker is open, so this call is never made
    rig.calls.close()
    counted = {fault: number for fault, number in rig.calls.faults.items() if number}
    assert counted == {RemoteFault.OTHER: 2, RemoteFault.DENIED: 1}


# -- the errors of a disk -----------------------------------------------------------------------------------------


def test_a_disk_that_cannot_be_opened_is_not_tried_again() -> None:
    rig, errors = Rig("disk"), [OSError("no"), OSError("no")]
    rig.opening = lambda: raising(errors.pop())()
    for _ in range(3):
        rig.turn(100.0)
    assert isinstance(rig.policy, ErrorRow)
    assert (len(errors), rig.calls.works, rig.policy.is_opening) == (1, False, False)


def test_a_disk_is_closed_after_eight_errors_in_a_row() -> None:
    rig = Rig("disk").opened()
    with capture_logs() as lines:
        fail(rig, 7)
        succeed(rig)
        fail(rig, 7)
        assert rig.calls.works
        fail(rig, 1)
        rig.turn(1000.0)
        rig.call("too late")
        rig.turn()
    assert not rig.calls.works
    assert (len(rig.ended), rig.ended[-1].was_made) == (17, False)
    in_a_row = [line["in_a_row"] for line in lines if line["event"] == "disk_call_failed"]
    assert in_a_row == [*range(1, 8), *range(1, 9)]
    assert [line["event"] for line in lines].count("disk_stopped") == 1
