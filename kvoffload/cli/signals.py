"""Signal handlers: SIGTERM and SIGHUP end a command as Ctrl-C does, each with its own exit code.

The first signal raises KeyboardInterrupt, or cancels the main task if `run_async` runs, so that the task can drain
copies. After the first signal, Ctrl-C exits at once and other signals have no effect. A signal that was ignored when
the command started stays ignored, as `nohup` and background jobs of scripts require.

While a module is imported, the exception waits until the import has ended. An import may lose it, because Python ignores
the exceptions of a weak reference's callback, or wrap it in another exception, and torch's C++ code would abort.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_IMPORTING = "<frozen importlib._bootstrap>"
_RETRY_S = 0.01

# Globals, because a process has one set of signal handlers.
_received = 0
_cancel: Callable[[], object] | None = None


def handle() -> None:
    """Install the signal handlers. Call this function on the main thread."""
    global _received, _cancel
    _received, _cancel = 0, None
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def exit_code() -> int:
    """Return the exit code if SIGTERM or SIGHUP ended the command, otherwise 0."""
    return 128 + _received if _received in (signal.SIGTERM, signal.SIGHUP) else 0


def ended() -> None:
    """Ignore the first signal from now on, because the command has ended."""
    global _cancel
    _cancel = _do_nothing


def run_async(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine as `asyncio.run` does. A signal cancels the coroutine.

    Raises:
        KeyboardInterrupt: a signal cancelled the coroutine.
    """
    import asyncio

    async def cancellable() -> T:
        global _cancel
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        # The signal handler calls `_cancel`. If the loop waits in `select`, only a thread-safe call wakes the loop.
        _cancel = lambda: loop.call_soon_threadsafe(task.cancel)  # noqa: E731
        if _received:
            _interrupt(_received, None)
        try:
            return await coroutine
        finally:
            _cancel = _do_nothing

    global _cancel
    _cancel = _do_nothing  # An exception in the start or the end of the loop would leave coroutines behind.
    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if not _received:
            raise
        raise KeyboardInterrupt from None
    finally:
        _cancel = None


def _do_nothing() -> None:
    pass


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _received
    if _received:
        if number == signal.SIGINT:
            os._exit(128 + number)
        return
    _received = number
    _interrupt(number, frame)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Cancel the main task, or raise KeyboardInterrupt. While a module is imported, try again later."""
    global _cancel
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    if frame is not None:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
    elif _cancel is None:
        raise KeyboardInterrupt
    else:
        cancel, _cancel = _cancel, _do_nothing  # once: a second cancellation would end the drain
        cancel()
