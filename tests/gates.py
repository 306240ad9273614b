"""A gate for threads, and an executor without threads. A test that controls both needs no sleeps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from kvoffload.transfer.ports import Threads

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE_S = 30.0  # the time limit of a wait in a test, in seconds


class ThreadGate:
    """Holds threads until the gate is opened, and counts arrivals."""

    def __init__(self) -> None:
        self.arrivals = 0
        self._is_open = False
        self._changed = threading.Condition()

    def arrive(self) -> None:
        """Count the calling thread, and wait until the gate is open.

        Raises:
            TimeoutError: the gate was not opened in time.
        """
        with self._changed:
            self.arrivals += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._is_open, _PATIENCE_S):
                raise TimeoutError("the gate was not opened")

    def wait_for_arrivals(self, count: int) -> None:
        """Wait until `count` threads have arrived in total.

        Raises:
            TimeoutError: fewer threads arrived within the time limit.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.arrivals >= count, _PATIENCE_S):
                raise TimeoutError(f"{self.arrivals} of {count} threads came to the gate")

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class ManualExecutor(Threads):
    """Runs submitted calls on the test's thread when the test asks for it.

    Args:
        held: if False, each call runs when it is submitted.
    """

    def __init__(self, *, held: bool = True) -> None:
        self._held = held
        self._work: deque[Callable[[], None]] = deque()
        self._refusals: deque[Exception] = deque()
        self._errors: deque[Exception] = deque()
        self._is_shut = False

    @property
    def waiting(self) -> int:
        return len(self._work)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._is_shut:
            raise RuntimeError("executor was shut down")
        if self._refusals:
            raise self._refusals.popleft()
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._errors:
                    raise self._errors.popleft()
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # the future passes the exception on to the caller
                future.set_exception(error)

        self._work.append(work)
        if not self._held:
            self.run_next()
        return future

    def refuse(self, error: Exception) -> None:
        self._refusals.append(error)

    def lose_next(self, error: Exception) -> None:
        """End the oldest call with `error` instead of running it."""
        self._errors.append(error)
        self.run_next()

    def hold(self) -> None:
        """Keep submitted calls in the queue from now on."""
        self._held = True

    def release(self) -> None:
        """Run all queued calls, and from now on each call when it is submitted."""
        self._held = False
        self.run_all()

    def run_next(self) -> None:
        self._work.popleft()()

    def run_all(self) -> None:
        while self._work:
            self.run_next()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
