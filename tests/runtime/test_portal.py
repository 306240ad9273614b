from __future__ import annotations

import asyncio
import gc
import operator
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import Empty

import pytest

from kvoffload.bus.sleeper import Sleeper
from kvoffload.runtime.portal import BellLoop, DaemonExecutor, Portal, PortalClosed
from tests.captured_logs import capture_logs
from tests.gates import ThreadGate

PATIENCE_S = 30


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal("test")
    yield portal
    portal.close(PATIENCE_S)


async def thread_name(suffix: str) -> str:
    return threading.current_thread().name + suffix


def endless(portal: Portal) -> tuple[Future[None], Future[None]]:
    """Start a coroutine that never ends by itself; return its future, and one that is done when the coroutine ends."""
    begun, ended = Future[None](), Future[None]()

    async def wait() -> None:
        try:
            begun.set_result(None)
            await asyncio.Event().wait()
        finally:
            ended.set_result(None)

    future = portal.spawn(wait)
    begun.result(PATIENCE_S)
    return future, ended


def test_the_portal_starts_no_thread_before_its_first_use(portal: Portal) -> None:
    threads = threading.active_count()
    assert not portal.is_alive
    assert Portal("unused").close()
    assert threading.active_count() == threads
    assert portal.spawn(thread_name, "!").result(PATIENCE_S) == "test!"
    assert portal.is_alive


def test_a_coroutine_that_raises_fails_its_future(portal: Portal) -> None:
    async def fail() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        portal.spawn(fail).result(PATIENCE_S)
    assert portal.is_alive


def test_cancelling_the_future_cancels_the_coroutine(portal: Portal) -> None:
    future, ended = endless(portal)
    future.cancel()
    ended.result(PATIENCE_S)


@pytest.mark.parametrize("way", ["call_soon_threadsafe", "call_from_thread"])
def test_waking_the_loop_writes_to_no_socket(way: str, portal: Portal) -> None:
    portal.spawn(thread_name, "").result(PATIENCE_S)
    loop, woken, called = portal._loop_thread[0], threading.Event(), list[str]()  # type: ignore[index]
    sys.setprofile(lambda _, event, call: called.append(call.__name__) if event == "c_call" else None)
    try:
        getattr(loop, way)(woken.set)
    finally:
        sys.setprofile(None)
    assert woken.wait(PATIENCE_S)
    assert "put" in called
    assert "send" not in called


def test_a_callback_that_comes_when_the_loop_has_just_found_none_runs_without_another_wake(
    portal: Portal,
) -> None:
    portal.spawn(thread_name, "").result(PATIENCE_S)
    loop, gate, ran = portal._loop_thread[0], ThreadGate(), Future[str]()  # type: ignore[index]
    assert isinstance(loop, BellLoop)
    rings = loop._bell._rings

    class Held:
        """The rings, of which the loop's thread finds no more and is then held before it goes on."""

        get = staticmethod(rings.get)
        put = staticmethod(rings.put)

        def get_nowait(self) -> object:
            try:
                return rings.get_nowait()
            except Empty:
                gate.arrive()
                raise

    loop._bell._rings = Held()  # type: ignore[assignment]
    loop.call_soon_threadsafe(int)
    gate.wait_for_arrivals(1)
    loop.call_from_thread(lambda: ran.set_result(threading.current_thread().name))
    gate.open()
    assert ran.result(PATIENCE_S) == "test"


def test_a_sleeper_is_woken_without_a_handle_made_on_the_waking_thread(portal: Portal) -> None:
    sleeper, asleep, called = Sleeper(), Future[None](), list[str]()

    def has_work() -> bool:
        asleep.set_result(None)
        return False

    slept = portal.spawn(sleeper.sleep, has_work)
    asleep.result(PATIENCE_S)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        assert sleeper.wake()
    finally:
        sys.setprofile(None)
    slept.result(PATIENCE_S)
    assert "call_from_thread" in called
    assert "call_soon" not in called


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_portal_whose_loop_is_stopped_while_it_ends_is_not_alive(portal: Portal) -> None:
    open_ended = []

    async def endless() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)

    async def begin() -> None:
        open_ended.append(endless())
        await anext(open_ended[0])

    portal.spawn(begin).result(PATIENCE_S)
    loop, thread = portal._loop_thread  # type: ignore[misc]  # it was started
    loop.call_soon_threadsafe(lambda: (loop.stop(), loop.call_soon(loop.stop)))
    thread.join(PATIENCE_S)
    assert not portal.is_alive


def test_a_closed_loop_refuses_a_callback(portal: Portal) -> None:
    portal.spawn(thread_name, "").result(PATIENCE_S)
    loop = portal._loop_thread[0]  # type: ignore[index]
    assert portal.close(PATIENCE_S)
    assert isinstance(loop, BellLoop)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_from_thread(int)


def test_the_loop_refuses_descriptors_which_it_would_never_look_at(portal: Portal) -> None:
    async def listen() -> None:
        with socket.socket() as listener:
            asyncio.get_running_loop().add_reader(listener, print)

    with pytest.raises(NotImplementedError, match="use its executor"):
        portal.spawn(listen).result(PATIENCE_S)
    assert portal.is_alive


def test_other_threads_wake_the_loop_in_debug_mode_too() -> None:
    code = """
from kvoffload.runtime.portal import Portal
async def answer(): return "answer"
portal = Portal("p")
print(portal.spawn(answer).result(10), portal.spawn(answer).result(10), portal.close(10))
"""
    assert run_python(code, PYTHONASYNCIODEBUG="1").stdout == "answer answer True\n"


def test_close_cancels_coroutines_waits_for_them_and_is_final(portal: Portal) -> None:
    future, ended = endless(portal)
    executor = portal.executor
    assert portal.close(PATIENCE_S)
    assert ended.done()
    with pytest.raises(CancelledError):
        future.result(0)
    assert not portal.is_alive
    assert portal.close(PATIENCE_S)
    for use in (lambda: portal.spawn(thread_name, ""), lambda: portal.executor):
        with pytest.raises(PortalClosed, match="portal 'test' is closed"):
            use()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(print)


def test_a_sleeping_coroutine_without_references_is_not_collected(portal: Portal) -> None:
    ended = endless(portal)[1]
    portal.spawn(thread_name, "").result(PATIENCE_S)  # from here on, the thread sleeps in its loop
    gc.collect()
    assert not ended.done()
    assert portal.close(PATIENCE_S)
    assert ended.done()


def test_close_can_be_called_on_the_loops_thread(portal: Portal) -> None:
    closed: Future[bool] = Future()

    async def close() -> None:
        closed.set_result(portal.close(PATIENCE_S))

    portal.spawn(close)
    assert closed.result(PATIENCE_S) is False  # `close` must return False, because the call is still pending
    assert portal.close(PATIENCE_S)


def test_close_has_a_time_limit_and_a_second_close_does_not_shorten_the_first(portal: Portal) -> None:
    begun, cleaning, cleaned = Future[None](), Future[None](), Future[None]()
    may_end: Future[asyncio.Event] = Future()

    async def slow() -> None:
        ended = asyncio.Event()
        may_end.set_result(ended)
        try:
            begun.set_result(None)
            await asyncio.Event().wait()
        finally:
            cleaning.set_result(None)
            await ended.wait()
            cleaned.set_result(None)

    portal.spawn(slow)
    begun.result(PATIENCE_S)
    assert not portal.close(0.0)
    cleaning.result(PATIENCE_S)
    loop = portal._loop_thread[0]  # type: ignore[index]  # it was started
    assert not portal.close(0.0)
    loop.call_soon_threadsafe(may_end.result(0).set)
    assert portal.close(PATIENCE_S)
    assert cleaned.done()
    assert loop.is_closed()


def test_a_coroutine_started_before_close_ends_with_it(portal: Portal) -> None:
    asked, closed = ThreadGate(), Future[bool]()

    class Slow(Portal):
        def _started_loop(self) -> asyncio.AbstractEventLoop:
            loop = super()._started_loop()
            asked.arrive()
            return loop

    slow = Slow("slow")
    spawned: Future[Future[str]] = Future()
    threading.Thread(target=lambda: spawned.set_result(slow.spawn(thread_name, "")), daemon=True).start()
    asked.wait_for_arrivals(1)
    threading.Thread(target=lambda: closed.set_result(slow.close(PATIENCE_S)), daemon=True).start()
    assert slow._lock.locked()  # `close` must wait for this lock
    asked.open()
    assert closed.result(PATIENCE_S)
    assert wait_for([spawned.result(PATIENCE_S)], PATIENCE_S).done


def test_copies_run_concurrently_and_a_hanging_copy_does_not_delay_the_next(portal: Portal) -> None:
    gate = ThreadGate()
    hanging = portal.executor.submit(gate.arrive)
    gate.wait_for_arrivals(1)
    assert portal.executor.submit(pow, 2, 5).result(PATIENCE_S) == 32
    gate.open()
    hanging.result(PATIENCE_S)


def test_work_that_raises_fails_its_future_and_the_thread_continues() -> None:
    executor = DaemonExecutor("one", 1)
    failing = executor.submit(int, "x")
    assert executor.submit(int, "1").result(PATIENCE_S) == 1
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(0)
    executor.shutdown()


def test_a_thread_outlives_a_call_without_a_future_that_raises() -> None:
    executor = DaemonExecutor("one", 1)
    with capture_logs() as logs:
        executor.start(partial(operator.truediv, 1, 0))
        assert executor.submit(int, "1").result(PATIENCE_S) == 1
    assert [entry["event"] for entry in logs] == ["call_failed"]
    executor.shutdown()


def test_an_executor_works_again_after_the_system_has_refused_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, start, refusals = DaemonExecutor("two", 2), threading.Thread.start, [3]

    def refuse(thread: threading.Thread) -> None:
        refusals[0] -= 1
        if refusals[0] >= 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = list[int]()
    for number in range(3):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            executor.submit(ran.append, number)
    gate, name = ThreadGate(), lambda: threading.current_thread().name
    assert executor.submit(name).result(PATIENCE_S) == "two-1"
    assert ran == []  # refused calls are not made later
    refusals[0] = 1
    hanging = executor.submit(gate.arrive)  # the one thread makes it
    gate.wait_for_arrivals(1)
    assert executor.submit(name).result(PATIENCE_S) == "two-2"
    gate.open()
    hanging.result(PATIENCE_S)
    executor.shutdown()


def test_cancelled_work_is_skipped_and_queued_work_runs_after_shutdown() -> None:
    executor, gate, ran = DaemonExecutor("one", 1), ThreadGate(), list[int]()
    executor.submit(gate.arrive)
    gate.wait_for_arrivals(1)
    cancelled, kept = executor.submit(ran.append, 1), executor.submit(ran.append, 2)
    assert cancelled.cancel()
    executor.shutdown()
    executor.shutdown()
    gate.open()
    assert wait_for([kept], PATIENCE_S).done
    assert ran == [2]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_process_ends_although_a_copy_and_a_coroutine_still_run() -> None:
    code = """
import asyncio, threading
from kvoffload.runtime.portal import Portal
portal, begun = Portal("p"), threading.Event()
portal.executor.submit(lambda: (begun.set(), threading.Event().wait()))
portal.spawn(asyncio.Event().wait)
begun.wait()
print("end")
"""
    ended = run_python(code)
    assert (ended.returncode, ended.stdout) == (0, "end\n")


def test_a_forked_child_has_its_own_portal_and_the_parent_continues() -> None:
    code = """
import os, sys, threading
from kvoffload.runtime.portal import Portal
async def name(): return threading.current_thread().name
portal = Portal("p")
portal.spawn(name).result(10); portal.executor.submit(int).result(10)
child = os.fork()
if child == 0:
    assert not portal.is_alive
    ok = portal.spawn(name).result(10) == "p" and portal.executor.submit(int).result(10) == 0
    ok = ok and portal.close(10)
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), portal.is_alive, portal.spawn(name).result(10), portal.close(10))
"""
    ended = run_python(code)
    assert (ended.stdout, ended.stderr) == ("0 True p True\n", "")
