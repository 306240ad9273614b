"""Calls to a rank's slot file or to a remote tier, which may block for any length of time.

    the owner's thread    submit ─▶ queues, reads first ─┐                               ┌─▶ ended ─▶ poll
                                                         └─▶ a thread: `work`, then `use`┘

A disk may hang, and a remote client may block for a minute. So a call has two parts, and a token that can be taken only
once. The thread that takes the token ends the call:

* `work` may hang. It runs on a thread of the executor, without the token, so it may run after the call has ended, when
  the host slots of its job belong to other blocks. It writes only its thread's memory, or memory that the caller does
  not reuse after a call has hung. It may read host slots, but must call `Call.check` before their bytes leave the
  process; `check` raises if the token is taken.
* `use` runs on the same thread, after that thread has taken the token. To the owner, the call has not ended, so the
  host slots still belong to the job. Only `use` may write them. Disk calls are an exception: `work` may read from
  the disk straight into host slots, or write to the disk straight from them. If such a call hangs, its job's report
  names these host slots (for a read) or the file slots (for a write), which are never used again.
* The owner's thread takes the token of a call that does not return in time, and of all calls when it closes. If `work`
  returns after that, the call's thread drops the result.

A call that hangs occupies its thread until it returns. A policy decides whether further calls are made:

    Breaker   closed ─3 failures in a row, or a hang─▶ open ─pause─▶ probe ─worked─▶ on trial ─a read worked─▶ closed
                                                        ▲              └─failed─▶ open   └─1 failure─▶ open
    ErrorRow  opening ─worked─▶ closed ─8 errors in a row─▶ failed until restart
                 └─failed─▶ failed until restart       while a call hangs, no other call starts

Only a probe opens the resource, so attempts to reconnect are as rare as calls to a failing remote tier.

The threads write these attributes:

* The owner's thread appends to the queues and updates the policy. It sets `is_stuck` and the error of a call whose
  token it has taken. It calls every `ended`, and never waits.
* The thread of a call sets `began` before it adds the call to the active ones. Once it has the token, it sets the
  result, the error and `took`. Then it adds the call to `ended`, and finally removes the call from the active ones.
* A probe sets `resource`. A thread that finds the connection lost clears `resource`, under a lock. After `close`, a
  thread that finds no active call clears `resource` in the same way.

Containers are accessed only by single operations, which are atomic in Python.

If a thread returns from a compiled client while the interpreter is shutting down, the process aborts. So the exit of
the process waits briefly until no thread is in a call, except for calls known to hang. The exit also waits until the
client's own threads have left the interpreter: the S3 client's threads wake our event loop, and our thread may finish
before these threads return.
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

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import KVOffloadError, RemoteGone

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

_CONNECT_S = 30.0
"""Extra seconds for a probe that must connect first. No client takes longer to connect."""
PROBE = "kvo1/probe"  # name of the object that a probe reads; the object need not exist
_EXIT_S = 1.0
"""The longest time in seconds that the process waits at exit for calls. Calls within one machine take milliseconds."""
_EXIT_PAUSE_S = 0.001


class Closable(Protocol):
    """A resource that calls are made to."""

    def close(self) -> None:
        """Release the resource. Called only while no call to it is running."""


ResourceT = TypeVar("ResourceT", bound=Closable)

Ended = Callable[["Call"], None]
"""Receives an ended call, on the owner's thread."""


class CallEnded(KVOffloadError):
    """Raised within a call that must not continue: its owner has ended it, or there is no connection."""


@dataclass(slots=True, eq=False)
class Call:
    """One call, and how it ended.

    Args:
        work, use: the two parts of the call; see `BlockingCalls.submit`.
        ended: receives the call once it has ended.
        accepted_at: when the call was submitted.
        limit_s: seconds after which the call counts as hanging.
        is_write, is_probe: the kind of call, for the policy.
        job: the job that the call belongs to; None if it belongs to none.
        began, took: when `work` began, and the seconds it took, at most the time limit; 0 if the call was never made.
        result: the result of the call; None if it failed or was not made.
        error: the reason why the call failed; None if it succeeded or was not made.
        fault: why the call failed or its values were refused, as a label of metrics.
        is_stuck: whether `work` did not return in time.
        is_gone: whether the connection was lost.
        is_cancelled: whether the call is no longer needed.
        was_made: whether `work` was called.
        token: a list with one item; the thread that pops the item ends the call.
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
    fault: RemoteFault | None = None
    is_stuck: bool = False
    is_gone: bool = False
    is_cancelled: bool = False
    was_made: bool = False
    token: list[None] = field(default_factory=lambda: [None])

    def claim(self) -> bool:
        """Take the token; return False if another thread has taken it."""
        try:
            self.token.pop()
        except IndexError:
            return False
        return True

    def check(self) -> None:
        """Check, within `work`, that the call has not been ended. The host slots of an ended call's job may be reused.

        Raises:
            CallEnded: the owner's thread has ended the call.
        """
        if not self.token:
            raise CallEnded("the call had already been ended")


class Policy(Protocol):
    """Decides whether calls are made. Only the owner's thread uses it, except for `probe`.

    Attributes:
        lets_calls: whether calls are made: the circuit breaker is closed, or the tier has not failed for good.
        is_file: whether calls go to a file instead of a connection. For a file, neither opening nor waiting in the
            queue has a time limit, no call starts while another hangs, and closing does not block. For a connection,
            opening and waiting in the queue have time limits, and an executor's thread closes the connection.
        late: the log event for a hanging call that returned later.
        log: a logger whose fields identify the owner of the calls.
    """

    lets_calls: bool
    is_file: bool
    late: str
    log: BoundLogger

    def worked(self, call: Call) -> None:
        """Update the policy after a call that succeeded."""

    def failed(self, call: Call, now: float) -> None:
        """Update the policy after a call that failed or hangs."""

    def takes_probe(self, now: float) -> bool:
        """Return whether a probe is due; if so, the caller must make it."""

    def probe(self, resource: Any) -> None:  # noqa: ANN401
        """Make the probe's call to the resource. Runs on a thread that may block."""


class BlockingCalls(Generic[ResourceT]):
    """Calls from one owner to one resource.

    Args:
        connect: opens the resource; may raise, and may block for a while.
        executor: its threads make the calls, and may block for any length of time; `close` shuts it down.
        monotonic: returns the time in seconds; callable from any thread.
        policy: decides whether calls are made.
        timeout_s: seconds after which a call counts as hanging. A call to a remote tier is also dropped, and not
            reported to the policy, if it has waited this long in the queue.
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
        """The resource that calls are made to; None while it is not open."""
        self._reads: deque[Call] = deque()
        self._writes: deque[Call] = deque()
        self._active: dict[int, Call] = {}  # the running calls, by the id of their thread
        self._submitted: set[Future[None]] = set()
        self.ended: deque[Call] = deque()
        """Ended calls that `poll` has not handled yet."""
        self.faults = dict.fromkeys(RemoteFault, 0)
        """Failed calls and refused writes so far."""
        self._is_closed = False
        self._changing = threading.Lock()  # held while `resource` is cleared
        _MADE.add(self)

    # -- the owner's thread -------------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """Return whether calls may be submitted."""
        return self._policy.lets_calls and not self._is_closed and not self._waits

    @property
    def is_busy(self) -> bool:
        """Return whether a call is running, even if it has been ended."""
        return bool(self._active)

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
        """Queue a call. A later `poll` passes it to `ended`.

        Args:
            work: the part that may hang. If it raises, the call fails.
            ended: receives the call, with its result, on the owner's thread once the call has ended.
            use: receives the return value of `work` if the thread gets the token; returns the result of the call.
            is_write: whether the call is a write, which waits for all queued reads.
            job: the job that the call belongs to, for `cancel`.
            limit_s: seconds after which the call counts as hanging; by default `timeout_s`.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        call = Call(work, use, ended, self._monotonic(), limit_s, is_write, job=job)
        (self._writes if is_write else self._reads).append(call)
        if self.works:
            self._execute(self._run_next)

    def cancel(self, jobs: Collection[object]) -> None:
        """Start no further reads for `jobs`. Their queued reads end, without being made, when their turn comes."""
        for call in tuple(self._reads):
            call.is_cancelled |= call.job in jobs

    def poll(self) -> None:
        """End calls that have returned or take too long, and start a probe if one is due. Never waits."""
        now = self._monotonic()
        for call in tuple(self._active.values()):
            if call.began + call.limit_s <= now and call.claim():
                call.is_stuck = True
                call.error = f"a call has not returned for {call.limit_s:g} s"
                call.fault = RemoteFault.TIMEOUT
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
        """Make no more calls, and have the resource closed once the last call has returned. Never waits."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_queued()
        for call in tuple(self._active.values()):
            call.claim()  # A call that returns later must not use host memory, which may be released.
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
            if call.fault is not None:
                self.faults[call.fault] += 1
            call.ended(call)

    def _fail_queued(self) -> None:
        for queue in (self._reads, self._writes):
            while (call := _next_of(queue)) is not None:
                call.ended(call)

    # -- threads that may wait ----------------------------------------------------------------------------------

    def _run_next(self) -> None:
        """Make one queued call, reads before writes. The executor runs this once for each queued call."""
        call = _next_of(self._reads) or _next_of(self._writes)
        if call is None:  # `_fail_queued` has emptied the queues
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
        resource = error = result = fault = None
        is_gone = False
        try:
            resource = self._connected(call)
            result = call.work(call, resource)
            fault = getattr(result, "refused", None)
        except BaseException as raised:
            # A panic in a Rust client is not an `Exception`, but must end the call.
            error = self._text_of(raised)
            fault = getattr(raised, "fault", RemoteFault.OTHER)
            is_gone = isinstance(raised, RemoteGone)
            if is_gone:
                self._leave(resource)
        if call.claim():
            call.is_gone = is_gone
            call.fault = fault
            self._use(call, result, error)
        elif call.is_stuck and not is_gone:
            self._policy.log.warning(self._policy.late, after_s=round(self._monotonic() - call.began, 1))
        # Delete the call last, because the resource stays open while a call is active.
        del self._active[thread]
        if self._is_closed:
            self._disconnect()

    def _use(self, call: Call, result: object, error: str | None) -> None:
        """Run `use` and end the call. The calling thread must hold the call's token."""
        try:
            call.result = result if call.use is None or error is not None else call.use(result)
        except Exception as raised:
            error = self._text_of(raised)
        call.error = error
        call.took = self._monotonic() - call.began
        self.ended.append(call)

    def _text_of(self, raised: BaseException) -> str:
        """Return an exception's text. Of a class from outside this package, return only its name for a remote tier.

        The text of a remote client may repeat what a server wrote, and with it the credentials that the server received.
        """
        if self._policy.is_file or isinstance(raised, KVOffloadError):
            return str(raised) or repr(raised)
        return type(raised).__name__

    def _connected(self, call: Call) -> ResourceT:
        """Return the resource, which a probe opens first if necessary."""
        # Check `_is_closed` only once the call is in `_active`, where `close` and `_disconnect` look for running calls.
        if self._is_closed:
            raise CallEnded("the connection was closed")
        resource = self.resource
        if resource is None:
            if not call.is_probe:
                raise CallEnded("there is no connection")
            resource = self.resource = self._connect()
            # The limit counts from `began`, before the probe connected.
            call.limit_s = self._monotonic() - call.began + self._probe_s
        return resource

    def _probe(self, _: Call, resource: ResourceT) -> None:
        self._policy.probe(resource)

    def _leave(self, resource: ResourceT | None) -> None:
        """Clear a lost connection, unless another thread has cleared it already and a probe has reconnected."""
        with self._changing:
            if self.resource is resource:
                self.resource = None

    def _disconnect(self) -> None:
        with self._changing:
            if self._active:  # A client may crash if it is closed during a call.
                return
            resource, self.resource = self.resource, None
        if resource is not None:
            with suppress(OSError):  # A failing disk may raise this error, but the file is no longer needed.
                resource.close()


class Breaker:
    """Stops calls to a tier that fails, and probes the tier after a pause.

    A lost connection counts as a hang. The pause doubles each time until a read other than a probe succeeds, and is at
    least four times as long as the failed call took: requests wait for such calls, so a failing tier takes at most a
    fifth of their time. A successful read resets the count of failed reads, and a successful write resets the count of
    failed writes. A successful probe or write proves little, because a store's master may answer probes and writes
    without its nodes, and may claim to have values that its dead nodes cannot deliver.

    Args:
        log: a logger whose fields identify the owner of the calls.

    Attributes:
        works, fails, without: the log's words for the tier.
    """

    is_file = False
    late = "remote_call_returned"
    works, fails = "remote_works", "remote_fails"
    without = "the remote tier"

    _MOST_FAILURES = 3  # the number of failures in a row that opens the breaker
    _FIRST_PAUSE_S = 1.0
    _LONGEST_PAUSE_S = 60.0
    _PAUSE_PER_CALL = 4  # the pause's minimum length, as a multiple of the failed call's time

    def __init__(self, log: BoundLogger) -> None:
        self.lets_calls = False  # the first call must be a probe
        self.log = log
        self._was_logged: bool | None = None  # the value of `lets_calls` that was logged last
        # Failed reads since the last successful read, and failed writes since the last successful write.
        self._failures = [0, 0]
        self._pause_s = self._FIRST_PAUSE_S
        self._probe_at = 0.0
        self._is_probing = False

    def worked(self, call: Call) -> None:
        """Record a success. A successful probe closes the breaker."""
        self._failures[call.is_write] = 0
        if call.is_probe:
            self.lets_calls = True
            self._is_probing = False
        elif not call.is_write:
            self._pause_s = self._FIRST_PAUSE_S
        self._log_change(call)

    def failed(self, call: Call, now: float) -> None:
        """Count a failure; open the breaker after too many failures."""
        self._failures[call.is_write] += 1
        if call.is_probe:
            self._is_probing = False
        hangs = call.is_stuck or call.is_gone
        is_on_trial = self._pause_s > self._FIRST_PAUSE_S  # no read has succeeded since the breaker opened
        is_last = hangs or is_on_trial or sum(self._failures) >= self._MOST_FAILURES
        if call.is_probe or (self.lets_calls and is_last):
            self.lets_calls = False
            self._failures = [0, 0]
            pause_s = self._pause_s if call.is_probe else max(self._pause_s, self._PAUSE_PER_CALL * call.took)
            self._probe_at = now + min(pause_s, self._LONGEST_PAUSE_S)
            self._pause_s = min(2 * self._pause_s, self._LONGEST_PAUSE_S)
        self._log_change(call)

    def takes_probe(self, now: float) -> bool:
        """Return whether the pause is over and no probe runs. After True, the caller must make a probe."""
        if self.lets_calls or self._is_probing or now < self._probe_at:
            return False
        self._is_probing = True
        return True

    def probe(self, resource: Any) -> None:  # noqa: ANN401
        """Read a small object."""
        resource.read(PROBE)

    def _log_change(self, call: Call) -> None:
        """Log that the breaker has opened or closed, or that the first probe has failed."""
        if self.lets_calls is self._was_logged:
            return
        self._was_logged = self.lets_calls
        if self.lets_calls:
            self.log.info(self.works)
        else:
            self.log.error(self.fails, reason=call.error, note=f"the engine continues without {self.without}")


class ErrorRow:
    """Stops using a disk after too many errors in a row, or if its file cannot be opened.

    While a call hangs, no other call starts; a hanging call does not count as an error.

    Args:
        log: a logger whose fields identify the owner of the calls.
    """

    is_file = True
    late = "disk_call_returned"

    _MOST_ERRORS = 8  # the number of errors in a row after which the disk is not used any more

    def __init__(self, log: BoundLogger) -> None:
        self.lets_calls = False
        self.is_opening = True
        """True until the file was opened or could not be opened."""
        self._was_probed = False
        self.log = log
        self._errors = 0

    def worked(self, call: Call) -> None:
        """Reset the count of errors. If the call was the probe, the file is open now."""
        self._errors = 0
        if call.is_probe:
            self.lets_calls = True
            self.is_opening = False

    def failed(self, call: Call, now: float) -> None:
        """Count an error. A hanging call is logged but not counted."""
        if call.is_stuck:
            self.log.error("disk_call_hangs", job=call.job, timeout_s=call.limit_s)
            return
        if call.is_probe:
            self.is_opening = False
            return
        self._errors += 1
        self.log.error("disk_call_failed", error=call.error, in_a_row=self._errors)
        if self._errors == self._MOST_ERRORS:
            self.lets_calls = False
            reason = f"{self._errors} calls failed in a row: {call.error}"
            self.log.error("disk_stopped", reason=reason, note="the engine continues without the disk")

    def takes_probe(self, now: float) -> bool:
        """Return True at the first call only. The first probe opens the file, and there is no second probe."""
        is_first = not self._was_probed
        self._was_probed = True
        return is_first

    def probe(self, resource: Any) -> None:  # noqa: ANN401
        """Do nothing: opening the file was the probe."""


_MADE: weakref.WeakSet[BlockingCalls[Any]] = weakref.WeakSet()
"""All instances in this process; a thread in a call keeps its instance alive."""


@atexit.register
def _exit() -> None:
    """Prevent new calls, and wait for running calls and for client threads that run Python code."""
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
    """Return the threads that run Python code but were not started by Python, such as those of the S3 client."""
    return set(sys._current_frames()).difference(thread.ident for thread in threading.enumerate())


def _ignore(_: Call) -> None:
    pass


def _next_of(queue: deque[Call]) -> Call | None:
    try:
        return queue.popleft()
    except IndexError:
        return None
