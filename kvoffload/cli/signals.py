"""How SIGINT, SIGTERM and SIGHUP end a command: each with its own exit code, and never with a traceback.

What the first signal does depends on what the command is doing:

    starting, or importing modules   the process exits at once: an extension module may swallow an exception
    running an event loop            the main task is cancelled, and can drain what it submitted
    anything else                    an exception is raised: KeyboardInterrupt for SIGINT, SystemExit for the others

A second Ctrl-C exits at once, without waiting for copies. Other signals after the first are ignored, because
they would cut short what the first began. A signal that was ignored when the command started stays ignored: `nohup` and
background jobs of scripts rely on that.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")
Undo = Callable[[], object]

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class _State:
    """What a signal does now. Signal handlers belong to the process, and so does this.

    Args:
        exits_at_once: the first signal exits at once, unless there is a task to cancel.
        cancel: cancels the main task of the running event loop.
        received: the first signal; 0 before it.
        undo: called before an exit at once, the last one first.
    """

    exits_at_once: bool = True
    cancel: Callable[[], object] | None = None
    received: int = 0
    undo: list[Undo] = field(default_factory=list)


_now = _State()


def handle() -> None:
    """Handle the signals from now on. Only the main thread can."""
    global _now
    _now = _State()
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    sys.unraisablehook = _on_unraisable


def raising() -> AbstractContextManager[None]:
    """Let the first signal raise an exception in this block."""
    return _set(exits_at_once=False)


def importing() -> AbstractContextManager[None]:
    """Let a signal exit at once in this block, which imports modules or opens nothing that must be closed."""
    return _set(exits_at_once=True)


@contextmanager
def undone_on_exit(undo: Undo) -> Iterator[None]:
    """Call `undo` if a signal makes the process exit at once in this block; it must be quick and must not raise."""
    _now.undo.append(undo)
    try:
        yield
    finally:
        _now.undo.remove(undo)


def run_async(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine as `asyncio.run` does; the first signal cancels it.

    Raises:
        KeyboardInterrupt: SIGINT cancelled it.
        SystemExit: another signal cancelled it.
    """
    import asyncio

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        # From the handler, which may run inside `select`: only this wakes the loop.
        _now.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await coroutine
        finally:
            _now.cancel = None

    try:
        with importing():  # before and after the task nothing is open
            return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if not _now.received:
            raise
        _raise(_now.received)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if _now.received and number != signal.SIGINT:
        return
    if _now.received or (_now.cancel is None and _now.exits_at_once):
        _exit(number)
    _now.received = number
    if _now.cancel is None:
        _raise(number)
    _now.cancel()


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _exit(number: int) -> NoReturn:
    for undo in reversed(_now.undo):
        undo()
    if number == signal.SIGINT:
        with suppress(OSError):
            os.write(2, b"kvoffload: interrupted\n")
    os._exit(128 + number)


def _on_unraisable(found: sys.UnraisableHookArgs) -> None:
    """Exit where a signal's exception was raised in a finalizer: Python would print it and go on."""
    if _now.received and isinstance(found.exc_value, KeyboardInterrupt | SystemExit):
        _exit(_now.received)
    sys.__unraisablehook__(found)


@contextmanager
def _set(*, exits_at_once: bool) -> Iterator[None]:
    before = _now.exits_at_once
    _now.exits_at_once = exits_at_once
    try:
        yield
    finally:
        _now.exits_at_once = before
