"""The threads that kvoffload starts in an engine's process.

A portal is a background thread with an event loop, and a few more threads for copies that block. The threads are daemon
threads, so that a copy that never ends cannot keep the process from exiting. Each thread starts at its first use, so an
unused portal costs nothing and a fork before the first use is harmless.

A fork copies the process's memory but not its threads. In the child, a portal starts new threads at its next use. The
child never closes the parent's loop, because closing it would unregister the parent's descriptors.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, TypeVarTuple

from kvoffload.logs import get_logger
from kvoffload.model.errors import KVOffloadError
from kvoffload.transfer.ports import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from contextvars import Context

    from _typeshed import FileDescriptorLike

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = get_logger("portal")

_COPY_THREADS = 2
_FROM_PARENT: list[
    object
] = []  # in a forked child: references that keep the parent's loops from being closed


class PortalClosed(KVOffloadError):
    """Raised when a portal is used after `close`, which is a bug in this package."""

    def __init__(self, name: str) -> None:
        super().__init__(f"portal {name!r} is closed")


class DaemonExecutor(Threads):
    """Daemon threads that start submitted calls in order. `ThreadPoolExecutor` would wait for its threads at exit.

    Args:
        name: the prefix of the threads' names.
        threads: the maximum number of threads. Each submitted call starts a thread until there are this many. If the system
            refuses a thread, the existing ones make the call, and the next call tries again.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._started = 0
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call.

        Raises:
            RuntimeError: the executor was shut down, or the system refuses its first thread; the call is not queued.
        """
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # `Future.result` raises the exception.
                future.set_exception(error)
            else:
                future.set_result(result)

        self.start(work)
        return future

    def start(self, work: Callable[[], None]) -> None:
        """Queue a call without making a future, which takes longer than to queue the call.

        Raises:
            RuntimeError: the executor was shut down, or the system refuses its first thread; the call is not queued.
        """
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"executor {self._name!r} was shut down")
            if self._started < self._threads:
                self._start_thread()
            self._work.put(work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new calls, and end the threads when the queue is empty. Return at once, even if `wait` is true."""
        with self._lock:
            if not self._is_shut:
                self._is_shut = True
                for _ in range(self._started):
                    self._work.put(None)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._started:
                raise
        else:
            self._started += 1

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            try:
                work()
            except Exception as error:  # The thread makes later calls, too.
                log.exception("call_failed", executor=self._name, reason=repr(error))
            del work  # An idle thread would otherwise keep the arguments of its last call in memory.


class Bell(selectors.BaseSelector):
    """A loop's selector that waits for rings, and for no descriptor. Any thread may ring.

    Args:
        call_soon: the loop's method, which gets the callbacks of rings.
    """

    def __init__(self, call_soon: Callable[[Callable[[], object]], object]) -> None:
        self._call_soon = call_soon
        self._rings: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._keys: dict[FileDescriptorLike, selectors.SelectorKey] = {}

    def ring(self, callback: Callable[[], object] | None = None) -> None:
        """End the current call of `select`, or the next one, and have the loop call `callback`.

        The calling thread keeps the GIL.
        """
        self._rings.put(callback)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for a ring, at most `timeout` seconds. Return no events."""
        with suppress(Empty):
            if timeout != 0:
                self._answer(self._rings.get(timeout=timeout))
            while True:
                self._answer(self._rings.get_nowait())
        return []

    def _answer(self, callback: Callable[[], object] | None) -> None:
        if callback is not None:
            self._call_soon(callback)

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: object = None
    ) -> selectors.SelectorKey:
        """Accept one descriptor, the loop's own, which is never used.

        Raises:
            NotImplementedError: the descriptor is another one.
        """
        if self._keys:
            raise NotImplementedError("the portal's loop cannot wait for descriptors; use its executor")
        key = selectors.SelectorKey(fileobj, -1, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._keys


class BellLoop(asyncio.SelectorEventLoop):
    """An event loop that other threads wake by a bell.

    Other loops are woken by a write to a socket, which releases the GIL. The engine's thread would then wait while the
    woken thread, or one that copies, runs its Python.
    """

    def __init__(self) -> None:
        self._bell = Bell(self.call_soon)
        super().__init__(self._bell)
        self.set_debug(False)  # in debug mode, `call_soon` refuses calls of other threads

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run `callback` on the loop's thread. Any thread may call this method.

        Raises:
            RuntimeError: the loop is closed.
        """
        handle = self.call_soon(callback, *args, context=context)  # appends to a deque, which is atomic
        self._bell.ring()
        return handle

    def call_from_thread(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop's thread, like `call_soon_threadsafe`, but make no handle on the calling thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        if self.is_closed():
            raise RuntimeError("the loop is closed")
        self._bell.ring(callback)


class Portal:
    """A background thread with an event loop, started at its first use, and threads for calls that block.

    Args:
        name: the prefix of the threads' names.
    """

    _loop_thread: tuple[asyncio.AbstractEventLoop, threading.Thread] | None

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_closed = False
        self._begin_in_this_process()

    @property
    def is_alive(self) -> bool:
        """Return whether the loop's thread was started in this process and has not closed its loop, its last act."""
        started = self._loop_thread
        # A hook asks in each step with open jobs. The thread's own `is_alive` took a fifth of a step that starts a store.
        return started is not None and self._pid == os.getpid() and not started[0].is_closed()

    @property
    def executor(self) -> Threads:
        """Return the executor for calls that block.

        Raises:
            PortalClosed: the portal is closed.
        """
        self._leave_parent()
        with self._lock:
            self._check_open()
            return self._executor

    def new_executor(self, purpose: str, threads: int = 1) -> Executor:
        """Return an executor with its own threads, for calls that may block for long. The caller must shut it down."""
        return DaemonExecutor(f"{self.name}-{purpose}", threads)

    def spawn(
        self, async_fn: Callable[P, Coroutine[object, object, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the returned future cancels the coroutine.

        Raises:
            PortalClosed: the portal is closed.
        """
        self._leave_parent()
        # The lock ensures that `close` cancels every coroutine that started before it.
        with self._lock:
            self._check_open()
            return self._begin(async_fn(*args, **kwargs), self._started_loop())

    def close(self, timeout: float = 10.0) -> bool:
        """Cancel all coroutines, wait for them to end, and stop the loop. A second call only waits.

        Args:
            timeout: how many seconds to wait.

        Returns:
            True if all coroutines ended in time. The others keep running on the daemon thread.
        """
        self._leave_parent()
        with self._lock:
            is_first = not self._is_closed
            self._is_closed = True
            started, executor = self._loop_thread, self._executor
        ended = True
        if started is not None:
            loop, thread = started
            # Cancel only once: a second cancellation would interrupt the coroutines' cleanup.
            if is_first and thread.is_alive():
                cancelled = self._begin(_cancel_all(), loop)
                cancelled.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
            if thread is not threading.current_thread():
                thread.join(timeout)
            ended = not thread.is_alive()
        executor.shutdown(wait=False)
        return ended

    def _begin(self, coroutine: Coroutine[object, object, T], loop: asyncio.AbstractEventLoop) -> Future[T]:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop_thread is None:
            loop = BellLoop()
            thread = threading.Thread(target=_run, args=(loop,), name=self.name, daemon=True)
            thread.start()
            self._loop_thread = (loop, thread)
        return self._loop_thread[0]

    def _check_open(self) -> None:
        if self._is_closed:
            raise PortalClosed(self.name)

    def _leave_parent(self) -> None:
        """In a forked child, start anew: the child lacks the parent's threads, and may have inherited a locked lock."""
        if self._pid != os.getpid():
            _FROM_PARENT.append((self._loop_thread, self._executor, self._running))
            self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop_thread = None
        self._executor = DaemonExecutor(f"{self.name}-copy", _COPY_THREADS)
        # A loop has only weak references to its tasks, so without this set a sleeping task could be garbage-collected.
        self._running: set[Future[Any]] = set()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        try:
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def _cancel_all() -> None:
    """Cancel every other task and wait until all have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
