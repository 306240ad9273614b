"""Calls to one store, each with a time limit, behind a circuit breaker.

    the owner's thread   submit ─▶ queues, reads first ─┐                            ┌─▶ ended ─▶ poll: the caller learns of it
                                                        └─▶ a thread: call, then use ─┘

A store's client may block without a limit: a minute was seen. So a call has two parts. The first may hang; it touches only its own thread's
memory, and what it reads from other memory counts only if `check_awaited` passes afterwards. The second uses the result, and runs only if
the call is still awaited. A call that does not return in time has failed, opens the breaker, and occupies its thread until it returns.

A thread that returns to the interpreter from a compiled client while the interpreter ends aborts the process. So the exit of a process
waits for a moment until no thread is in a call, ignoring calls that are known to hang, and until the client's own threads have left the
interpreter: the S3 client's wake our event loop, and our thread may be done before the one that woke it has returned.

A probe connects, if there is no connection; no other call does. So a connection that ends is tried again as rarely as the store.

The owner's thread alone writes the breaker and reports ends; it waits for nothing. Either thread may end a call: the one that takes
its token does.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvoffload.logs import get_logger
from kvoffload.model.errors import RemoteError, RemoteGone
from kvoffload.remote.breaker import Breaker
from kvoffload.remote.store import RemoteStore

_PROBE = "kvo1/probe"  # need not be there
_CONNECT_S = 30.0
"""What a call that connects may take beyond its own time; no client takes longer."""
_EXIT_S = 1.0
"""How long the exit of the process may wait for all calls; those of one machine take milliseconds."""
_EXIT_PAUSE_S = 0.001

log = get_logger("remote")

Ended = Callable[[Any, float], None]
"""Receives a call's result, None if it failed, and the seconds it took."""


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[RemoteStore], Any]
    use: Callable[[Any], Any] | None
    ended: Ended
    accepted_at: float
    is_write: bool = False
    is_probe: bool = False
    was_made: bool = False
    began: float = 0.0
    took: float = 0.0
    result: Any = None
    error: str | None = None
    is_stuck: bool = False
    is_gone: bool = False
    """Its connection has ended."""
    token: list[None] = field(default_factory=lambda: [None])

    def claim(self) -> bool:
        """Take the token; False where it is taken."""
        try:
            self.token.pop()
        except IndexError:
            return False
        return True


class RemoteCalls:
    """The calls of one side of the engine: the scheduler's, or a rank's.

    Args:
        connect: opens the store; may raise, and block for a while.
        executor: its threads make the calls, and may wait for ever.
        monotonic: time in seconds, on any thread.
        timeout_s: seconds after which a call has failed.
        who: fields for the log.
    """

    def __init__(
        self,
        connect: Callable[[], RemoteStore],
        executor: Executor,
        monotonic: Callable[[], float],
        timeout_s: float,
        **who: object,
    ) -> None:
        self._connect = connect
        self._executor = executor
        self._monotonic = monotonic
        self._timeout_s = timeout_s
        self._log = log.bind(**who)
        self._breaker = Breaker()
        self._was_logged: bool | None = None  # as working, or as failing
        self._store: RemoteStore | None = None
        self._reads: deque[_Call] = deque()
        self._writes: deque[_Call] = deque()
        self._active: dict[int, _Call] = {}  # by thread
        self._submitted: set[Future[None]] = set()
        self.ended: deque[_Call] = deque()
        """Those that `poll` has not taken yet."""
        self._is_closed = False
        self._changing = threading.Lock()  # the connection, which ends
        _CONNECTED.add(self)

    # -- the owner's thread -------------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """Whether calls are made."""
        return self._breaker.is_closed and not self._is_closed

    def submit(
        self,
        work: Callable[[RemoteStore], Any],
        ended: Ended,
        use: Callable[[Any], Any] | None = None,
        *,
        is_write: bool = False,
    ) -> None:
        """Queue a call; `poll` ends it.

        Args:
            work: the part that may hang; it touches only its own thread's memory.
            ended: called on the owner's thread with the result.
            use: called before that on the calling thread, unless the call was too late; its answer becomes the result.
            is_write: it waits for all queued reads.
        """
        call = _Call(work, use, ended, self._monotonic(), is_write)
        (self._writes if is_write else self._reads).append(call)
        if self.works:
            self._execute(self._run_next)

    def poll(self) -> None:
        """End calls that have returned or take too long, and queue a probe when one is due. Never waits."""
        now = self._monotonic()
        limit_s = self._timeout_s if self._store is not None else self._timeout_s + _CONNECT_S
        for call in tuple(self._active.values()):
            if call.began + limit_s <= now and call.claim():
                call.is_stuck = True
                call.error = f"a call has not returned for {limit_s:g} s"
                call.took = limit_s
                self.ended.append(call)
        self._take_ended(now)
        if not self.works:
            self._fail_queued()
            if not self._is_closed and self._breaker.takes_probe(now):
                self._execute(partial(self._run, _Call(_probe, None, _ignore, now, is_probe=True)))

    def close(self) -> None:
        """Make no more calls, and have the connection closed when the last one has returned. Waits for nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._fail_queued()
            self._execute(self._disconnect)
            self._executor.shutdown(wait=False)

    def _execute(self, work: Callable[[], None]) -> None:
        running = self._executor.submit(work)
        self._submitted.add(running)
        running.add_done_callback(self._submitted.discard)

    def _take_ended(self, now: float) -> None:
        while self.ended:
            call = self.ended.popleft()
            kind = {"is_probe": call.is_probe, "is_write": call.is_write}
            if call.error is None and call.was_made:
                self._breaker.worked(**kind)
            elif call.error is not None:
                self._breaker.failed(now, call.took, hangs=call.is_stuck or call.is_gone, **kind)
            if self._breaker.is_closed is not self._was_logged:
                self._log_change(call)
            call.ended(call.result if call.error is None else None, call.took)

    def _log_change(self, call: _Call) -> None:
        """The breaker has opened or closed, or a store was not reached at the start."""
        self._was_logged = self._breaker.is_closed
        if self._was_logged:
            self._log.info("remote_works")
        else:
            self._log.error(
                "remote_fails", reason=call.error, note="the engine goes on without the remote store"
            )

    def _fail_queued(self) -> None:
        for queue in (self._reads, self._writes):
            while (call := _next_of(queue)) is not None:
                call.ended(None, 0.0)

    # -- threads that may wait for the store --------------------------------------------------------------------

    def _run_next(self) -> None:
        """Make one queued call, a read before any write. The executor runs this once for each queued call."""
        call = _next_of(self._reads) or _next_of(self._writes)
        if call is None:  # it was failed while it was queued
            return
        if (
            call.accepted_at + self._timeout_s <= self._monotonic() and call.claim()
        ):  # the store is slow, not dead
            self.ended.append(call)
            return
        self._run(call)

    def _run(self, call: _Call) -> None:
        call.began = self._monotonic()
        call.was_made = True
        thread = threading.get_ident()
        self._active[thread] = call
        error, result, store = None, None, self._store
        try:
            if self._is_closed:  # after the note: `_disconnect` looks who is active
                raise RemoteError("the connection was closed")
            if store is None:
                store = self._connected(call)
            result = call.work(store)
        except BaseException as raised:  # the call ends; a panic of a client in Rust is no Exception
            error = str(raised) or repr(raised)
            call.is_gone = isinstance(raised, RemoteGone)
        if call.is_gone:
            self._leave(store)
        if call.claim():
            self._use(call, result, error)
        elif not call.is_gone:
            self._log.warning("remote_call_returned", after_s=round(self._monotonic() - call.began, 1))
        del self._active[thread]
        if self._is_closed:
            self._disconnect()

    def check_awaited(self) -> None:
        """Within a call: check that it was not ended, so that memory lent to it is still its own.

        Raises:
            RemoteError: it was too late.
        """
        if not self._active[threading.get_ident()].token:
            raise RemoteError("the call was too late")

    def _use(self, call: _Call, result: object, error: str | None) -> None:
        """End a call whose token this thread has taken."""
        try:
            call.result = result if call.use is None or error is not None else call.use(result)
        except Exception as raised:
            error = repr(raised)
        call.error = error
        call.took = self._monotonic() - call.began
        self.ended.append(call)

    def _connected(self, call: _Call) -> RemoteStore:
        if not call.is_probe:
            raise RemoteError("there is no connection")
        self._store = self._connect()
        return self._store

    def _leave(self, store: RemoteStore | None) -> None:
        """Forget a connection that has ended; another thread may have done so, and a probe have made the next one."""
        with self._changing:
            if self._store is store:
                self._store = None

    def _disconnect(self) -> None:
        with self._changing:
            if self._active:  # a client closed under a running call may crash
                return
            store, self._store = self._store, None
        if store is not None:
            store.close()


_CONNECTED: weakref.WeakSet[RemoteCalls] = weakref.WeakSet()
"""Those of this process: a thread in a call keeps them alive."""


@atexit.register
def _exit() -> None:
    """The interpreter ends: begin no call, and wait until none runs and no thread of a client is left inside."""
    until = time.monotonic() + _EXIT_S
    running: list[Future[None]] = []
    for calls in tuple(_CONNECTED):
        calls._is_closed = True
        if not any(call.is_stuck for call in tuple(calls._active.values())):
            running += tuple(calls._submitted)
    wait(running, _EXIT_S)
    while _has_foreign_thread() and time.monotonic() < until:
        time.sleep(_EXIT_PAUSE_S)


def _has_foreign_thread() -> bool:
    """Whether a thread that Python did not start runs Python code, as the S3 client's do to wake an event loop."""
    ours = {thread.ident for thread in threading.enumerate()}
    return not ours.issuperset(sys._current_frames())


def _probe(store: RemoteStore) -> None:
    store.read(_PROBE)


def _ignore(_: object, __: float) -> None:
    pass


def _next_of(queue: deque[_Call]) -> _Call | None:
    try:
        return queue.popleft()
    except IndexError:
        return None
