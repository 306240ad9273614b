"""Calls that may block for any time, to a rank's slot file or to a remote tier.

    the owner's thread    submit ─▶ queues, reads first ─┐                               ┌─▶ ended ─▶ poll
                                                         └─▶ a thread: `work`, then `use`┘

A disk may hang, and a remote client was seen to block for a minute. So a call has two parts, and a token. The thread
that takes the token ends the call, and it is taken once:

* `work` may hang. It runs on a thread of the executor, without the token, so it may outlive the call: the host slots
  of its job may belong to other blocks while it runs. It writes only its thread's memory, or memory that the caller does
  not reuse after a call that hangs. It may read host slots, but calls `Call.check` before those bytes leave the
  process; `check` raises if the token is gone.
* `use` runs on the same thread, after that thread has taken the token. The owner has not seen an end, so the
  host slots are still the job's: only `use` may write them. There are two exceptions on the disk: a read straight into
  host slots and a write straight from them. If one hangs, its report names these slots, or the places in the file
  that it writes, and they are never used again.
* The owner's thread takes the token of a call that does not return in time, and of all calls when it closes. From
  then on the thread of that call runs nothing more of it, and what `work` returns late is dropped.

A call that hangs occupies its thread until it returns. A policy decides what follows:

    Breaker   closed ─3 failures in a row, or a hang─▶ open ─pause─▶ probe ─worked─▶ on trial ─a read worked─▶ closed
                                                        ▲              └─failed─▶ open   └─1 failure─▶ open
    ErrorRow  opening ─worked─▶ closed ─8 errors in a row─▶ failed, for good
                 └─failed─▶ failed, for good                 while a call hangs, no other begins

Only a probe opens the resource. So a connection that ended is tried again as rarely as a store that fails.

Which thread writes what:

* the owner's thread: the tails of the queues, the policy, `is_stuck` and the error of a call whose token it took. It
  calls every `ended`, and never waits;
* a thread in a call: `began` before the call is among the active ones; result, error and `took` once it has the
  token. Then it adds the call to `ended`, and last it leaves the active ones;
* the resource: a probe sets it. The thread that finds the connection gone, or after `close` the one that finds no
  call active, takes it away, under a lock.

Containers are accessed only by single operations, which are atomic in Python.

A thread that returns from a compiled client to an interpreter that ends aborts the process. So the exit of a process
waits for a moment until no thread is in a call, except for calls known to hang, and until the client's own threads
have left the interpreter: the S3 client's wake our event loop, and our thread may be done before they have returned.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvoffload.model.errors import KVOffloadError, RemoteGone

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

_CONNECT_S = 30.0
"""What a probe that connects may take beyond its own time; no client takes longer."""
_PROBE = "kvo1/probe"  # need not exist
_EXIT_S = 1.0
"""How long the exit of the process may wait for all calls; those of one machine take milliseconds."""
_EXIT_PAUSE_S = 0.001


class Closable(Protocol):
    """What calls are made to."""

    def close(self) -> None:
        """Release it. No call of it is running."""


ResourceT = TypeVar("ResourceT", bound=Closable)

Ended = Callable[["Call"], None]
"""Receives a call that has ended, on the owner's thread."""


class CallEnded(KVOffloadError):
    """Raised within a call that must not go on: its owner has ended it."""


@dataclass(slots=True, eq=False)
class Call:
    """One call, and how it ended.

    Args:
        work, use: its parts; see `BlockingCalls.submit`.
        ended: receives it.
        accepted_at: when it was submitted.
        limit_s: seconds after which it counts as hanging.
        is_write, is_probe: how the policy counts it.
        job: the job that it belongs to.
        began, took: when `work` began, and the seconds until the end or the time limit; 0 if it was never made.
        result: None if it failed.
        error: why it failed; None where it worked, or was not made.
        is_stuck: `work` had not returned in time.
        is_gone: the connection has ended.
        is_cancelled: it need not be made.
        was_made: `work` was called.
        token: what a thread takes to end it; empty once one has.
    """

    work: Callable[[Call, Any], Any]
    use: Callable[[Any], Any] | None
    ended: Ended
    accepted_at: float
    limit_s: float
    is_write: bool = False
    is_probe: bool = False
    job: object = None
    began: float = 0.0
    took: float = 0.0
    result: Any = None
    error: str | None = None
    is_stuck: bool = False
    is_gone: bool = False
    is_cancelled: bool = False
    was_made: bool = False
    token: list[None] = field(default_factory=lambda: [None])

    def claim(self) -> bool:
        """Take the token; False where it is taken."""
        try:
            self.token.pop()
        except IndexError:
            return False
        return True

    def check(self) -> None:
        """Within `work`: check that the call is still the thread's, so that memory lent to it is still its own.

        Raises:
            CallEnded: the owner's thread has ended it.
        """
        if not self.token:
            raise CallEnded("the call was too late")


class Policy(Protocol):
    """Decides whether calls are made. Only the owner's thread uses it.

    Attributes:
        is_closed: calls are made, as current flows through a closed breaker.
        is_file: calls are to a file. Opening it and waiting in a queue may take any time, no call begins while one hangs,
            and closing does not block. Connections are limited in both, and closed on a thread.
        late: the log's event for a call that returned after all.
        log: has the fields that say whose calls they are.
    """

    is_closed: bool
    is_file: bool
    late: str
    log: BoundLogger

    def worked(self, call: Call) -> None:
        """A call was made, and answered."""

    def failed(self, call: Call, now: float) -> None:
        """A call was made, and failed or hangs."""

    def takes_probe(self, now: float) -> bool:
        """Whether a probe is due; if so, the caller must make it."""

    def probe(self, resource: Any) -> None:  # noqa: ANN401
        """Make the call of a probe, on a thread that may wait."""


class BlockingCalls(Generic[ResourceT]):
    """The calls of one owner to one resource.

    Args:
        connect: opens the resource; may raise, and block for a while.
        executor: its threads make the calls, and may wait for any time; `close` shuts it down.
        monotonic: time in seconds, on any thread.
        policy: decides whether calls are made.
        timeout_s: seconds after which a call counts as hanging. A call to a connection that has not begun after as many is
            ended; the policy does not count it.
    """

    def __init__(
        self,
        connect: Callable[[], ResourceT],
        executor: Executor,
        monotonic: Callable[[], float],
        policy: Policy,
        timeout_s: float,
    ) -> None:
        self._connect = connect
        self._executor = executor
        self._monotonic = monotonic
        self._policy = policy
        self._timeout_s = timeout_s
        self._probe_s = inf if policy.is_file else timeout_s
        self._queue_s = inf if policy.is_file else timeout_s
        self.resource: ResourceT | None = None
        """What calls are made to, while it is open."""
        self._reads: deque[Call] = deque()
        self._writes: deque[Call] = deque()
        self._active: dict[int, Call] = {}  # by thread
        self._submitted: set[Future[None]] = set()
        self.ended: deque[Call] = deque()
        """Those that `poll` has not taken yet."""
        self._is_closed = False
        self._changing = threading.Lock()  # the resource, which ends
        _MADE.add(self)

    # -- the owner's thread -------------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """Whether calls are made."""
        return self._policy.is_closed and not self._is_closed and not self._waits

    @property
    def _waits(self) -> bool:
        return self._policy.is_file and any(call.is_stuck for call in tuple(self._active.values()))

    def submit(
        self,
        work: Callable[[Call, ResourceT], Any],
        ended: Ended,
        use: Callable[[Any], Any] | None = None,
        *,
        is_write: bool = False,
        job: object = None,
        limit_s: float | None = None,
    ) -> None:
        """Queue a call; `poll` ends it.

        Args:
            work: the part that may hang. What it raises fails the call.
            ended: called on the owner's thread once the call has ended; has its result.
            use: called with what `work` returned, if the token was not gone; its answer becomes the result.
            is_write: it waits for all queued reads.
            job: the job that it belongs to, for `cancel`.
            limit_s: seconds after which it counts as hanging; by default those of all calls.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        call = Call(work, use, ended, self._monotonic(), limit_s, is_write, job=job)
        (self._writes if is_write else self._reads).append(call)
        if self.works:
            self._execute(self._run_next)

    def cancel(self, jobs: Collection[object]) -> None:
        """Begin no more reads for these jobs; those that are queued end when their turn comes."""
        for call in tuple(self._reads):
            call.is_cancelled |= call.job in jobs

    def poll(self) -> None:
        """End calls that have returned or take too long, and make a probe when one is due. Never waits."""
        now = self._monotonic()
        for call in tuple(self._active.values()):
            if call.began + call.limit_s <= now and call.claim():
                call.is_stuck = True
                call.error = f"a call has not returned for {call.limit_s:g} s"
                call.took = call.limit_s
                self.ended.append(call)
        self._take_ended(now)
        if not self.works:
            self._fail_queued()
            if not self._is_closed and self._policy.takes_probe(now):
                limit_s = self._probe_s + (_CONNECT_S if self.resource is None else 0.0)
                probe = Call(self._probe, None, _ignore, now, limit_s, is_probe=True)
                self._execute(partial(self._run, probe))

    def close(self) -> None:
        """Make no more calls, and have the resource closed when the last one has returned. Waits for nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_queued()
        for call in tuple(self._active.values()):
            call.claim()  # what returns later may find the host's memory gone
        if self._policy.is_file:
            self._disconnect()
        else:
            self._execute(self._disconnect)
        self._executor.shutdown(wait=False)

    def _execute(self, work: Callable[[], None]) -> None:
        running = self._executor.submit(work)
        self._submitted.add(running)
        running.add_done_callback(self._submitted.discard)

    def _take_ended(self, now: float) -> None:
        while self.ended:
            call = self.ended.popleft()
            if call.was_made and call.error is None:
                self._policy.worked(call)
            elif call.was_made:
                self._policy.failed(call, now)
            call.ended(call)

    def _fail_queued(self) -> None:
        for queue in (self._reads, self._writes):
            while (call := _next_of(queue)) is not None:
                call.ended(call)

    # -- threads that may wait ----------------------------------------------------------------------------------

    def _run_next(self) -> None:
        """Make one queued call, a read before any write. The executor runs this once for each queued call."""
        call = _next_of(self._reads) or _next_of(self._writes)
        if call is None:  # it was failed while it was queued
            return
        is_late = call.accepted_at + self._queue_s <= self._monotonic()
        if call.is_cancelled or is_late:
            self.ended.append(call)
        else:
            self._run(call)

    def _run(self, call: Call) -> None:
        call.began = self._monotonic()
        call.was_made = True
        thread = threading.get_ident()
        self._active[thread] = call
        resource = error = result = None
        is_gone = False
        try:
            resource = self._connected(call)
            result = call.work(call, resource)
        except BaseException as raised:  # the call ends; a panic of a client in Rust is no Exception
            error = str(raised) or repr(raised)
            is_gone = isinstance(raised, RemoteGone)
            if is_gone:
                self._leave(resource)
        if call.claim():
            call.is_gone = is_gone
            self._use(call, result, error)
        elif call.is_stuck and not is_gone:
            self._policy.log.warning(self._policy.late, after_s=round(self._monotonic() - call.began, 1))
        del self._active[thread]  # last: while it is there, the resource stays open
        if self._is_closed:
            self._disconnect()

    def _use(self, call: Call, result: object, error: str | None) -> None:
        """End a call whose token this thread has taken."""
        try:
            call.result = result if call.use is None or error is not None else call.use(result)
        except Exception as raised:
            error = str(raised) or repr(raised)
        call.error = error
        call.took = self._monotonic() - call.began
        self.ended.append(call)

    def _connected(self, call: Call) -> ResourceT:
        """Return the resource; a probe opens it."""
        if self._is_closed:  # after the call is among the active ones: `close` and `_disconnect` look there
            raise CallEnded("the connection was closed")
        resource = self.resource
        if resource is None:
            if not call.is_probe:
                raise CallEnded("there is no connection")
            resource = self.resource = self._connect()
            call.limit_s = self._probe_s
        return resource

    def _probe(self, _: Call, resource: ResourceT) -> None:
        self._policy.probe(resource)

    def _leave(self, resource: ResourceT | None) -> None:
        """Forget a connection that has ended; another thread may have done so, and a probe have made the next one."""
        with self._changing:
            if self.resource is resource:
                self.resource = None

    def _disconnect(self) -> None:
        with self._changing:
            if self._active:  # a client closed under a running call may crash
                return
            resource, self.resource = self.resource, None
        if resource is not None:
            with suppress(OSError):  # of a disk that fails, which costs nothing any more
                resource.close()


class Breaker:
    """Stops calling a remote tier that fails, and tries it again with single calls.

    A connection that has ended counts as a hang. The pause doubles each time until a read other than a probe is
    answered, and is at least four times what the failed call took: requests wait for such calls, so a tier that fails
    takes at most a fifth of their time. A read that is answered ends the row of failed reads, a write that of failed
    writes. A probe or a write that is answered proves little: a store's master may answer both by itself, and report
    values that its dead nodes do not deliver.

    Args:
        log: of the calls.
    """

    is_file = False
    late = "remote_call_returned"

    _MOST_FAILURES = 3  # in a row
    _FIRST_PAUSE_S = 1.0
    _LONGEST_PAUSE_S = 60.0
    _PAUSE_PER_CALL = 4  # of what the failed call took

    def __init__(self, log: BoundLogger) -> None:
        self.is_closed = False  # a tier that was never reached begins with a probe
        self.log = log
        self._was_logged: bool | None = None  # as working, or as failing
        self._failures = [0, 0]  # of reads since one worked, and of writes
        self._pause_s = self._FIRST_PAUSE_S
        self._probe_at = 0.0
        self._is_probing = False

    def worked(self, call: Call) -> None:
        """Count an answer."""
        self._failures[call.is_write] = 0
        if call.is_probe:
            self.is_closed = True
            self._is_probing = False
        elif not call.is_write:
            self._pause_s = self._FIRST_PAUSE_S
        self._log_change(call)

    def failed(self, call: Call, now: float) -> None:
        """Count a failure; open after too many."""
        self._failures[call.is_write] += 1
        if call.is_probe:
            self._is_probing = False
        hangs = call.is_stuck or call.is_gone
        is_on_trial = self._pause_s > self._FIRST_PAUSE_S  # since the breaker was open no read was answered
        is_last = hangs or is_on_trial or sum(self._failures) >= self._MOST_FAILURES
        if call.is_probe or (self.is_closed and is_last):
            self.is_closed = False
            self._failures = [0, 0]
            pause_s = self._pause_s if call.is_probe else max(self._pause_s, self._PAUSE_PER_CALL * call.took)
            self._probe_at = now + min(pause_s, self._LONGEST_PAUSE_S)
            self._pause_s = min(2 * self._pause_s, self._LONGEST_PAUSE_S)
        self._log_change(call)

    def takes_probe(self, now: float) -> bool:
        """Whether the pause is over and no probe runs; if so, the caller must make one."""
        if self.is_closed or self._is_probing or now < self._probe_at:
            return False
        self._is_probing = True
        return True

    def probe(self, resource: Any) -> None:  # noqa: ANN401
        """Read a small object."""
        resource.read(_PROBE)

    def _log_change(self, call: Call) -> None:
        """Log that the breaker has opened or closed, or that the tier was not reached at the start."""
        if self.is_closed is self._was_logged:
            return
        self._was_logged = self.is_closed
        if self.is_closed:
            self.log.info("remote_works")
        else:
            self.log.error(
                "remote_fails", reason=call.error, note="the engine goes on without the remote tier"
            )


class ErrorRow:
    """Stops using a disk after too many errors in a row, or if its file cannot be opened.

    While a call hangs, no other begins; the call is no error.

    Args:
        log: of the calls.
    """

    is_file = True
    late = "disk_call_returned"

    _MOST_ERRORS = 8  # in a row

    def __init__(self, log: BoundLogger) -> None:
        self.is_closed = False
        self.is_opening = True
        """It is not yet known whether the file can be opened."""
        self._was_probed = False
        self.log = log
        self._errors = 0

    def worked(self, call: Call) -> None:
        """End the row of errors."""
        self._errors = 0
        if call.is_probe:
            self.is_closed = True
            self.is_opening = False

    def failed(self, call: Call, now: float) -> None:
        """Count an error. A call that hangs is logged and not counted."""
        if call.is_stuck:
            self.log.error("disk_call_hangs", job=call.job, timeout_s=call.limit_s)
            return
        if call.is_probe:
            self.is_opening = False
            return
        self._errors += 1
        self.log.error("disk_call_failed", error=call.error, in_a_row=self._errors)
        if self._errors == self._MOST_ERRORS:
            self.is_closed = False
            reason = f"{self._errors} calls failed in a row: {call.error}"
            self.log.error("disk_stopped", reason=reason, note="the engine goes on without it")

    def takes_probe(self, now: float) -> bool:
        """Whether the file was not opened yet: it is opened once."""
        is_first = not self._was_probed
        self._was_probed = True
        return is_first

    def probe(self, resource: Any) -> None:  # noqa: ANN401
        """Do nothing: the file is open."""


_MADE: weakref.WeakSet[BlockingCalls[Any]] = weakref.WeakSet()
"""Those of this process: a thread in a call keeps them alive."""


@atexit.register
def _exit() -> None:
    """Before the interpreter ends, wait until no call runs and no client's thread runs Python code. No new call begins."""
    until = time.monotonic() + _EXIT_S
    running: list[Future[None]] = []
    has_client = False
    for calls in tuple(_MADE):
        has_client |= not calls._policy.is_file
        calls._is_closed = True
        if not any(call.is_stuck for call in tuple(calls._active.values())):
            running += tuple(calls._submitted)
    wait(running, _EXIT_S)
    while has_client and _foreign_threads() and time.monotonic() < until:
        time.sleep(_EXIT_PAUSE_S)


def _foreign_threads() -> set[int]:
    """Return the threads that Python did not start and that run Python code, as the S3 client's do to wake an event loop."""
    return set(sys._current_frames()).difference(thread.ident for thread in threading.enumerate())


def _ignore(_: Call) -> None:
    pass


def _next_of(queue: deque[Call]) -> Call | None:
    try:
        return queue.popleft()
    except IndexError:
        return None
