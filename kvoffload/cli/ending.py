"""SIGTERM ends a command in order: what it opened is closed, and its exit code says so. SIGINT has no part in it.

A process that a script starts in the background has SIGINT ignored, so SIGTERM must do without it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

from kvoffload.cli.exits import Exit

T = TypeVar("T")


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Raise `SystemExit` in this block on SIGTERM. Does nothing in other threads than the main one, which gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_async(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine as `asyncio.run` does; SIGTERM cancels it once, so that it ends in order.

    Raises:
        SystemExit: it was cancelled by SIGTERM.
    """

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel_once, task)
        return await coroutine

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:  # by Ctrl-C it would be KeyboardInterrupt
        sys.exit(Exit.TERMINATED)


def _cancel_once(task: asyncio.Task[object]) -> None:
    if not task.cancelling():  # a second time would cut short what the first began
        task.cancel()


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(Exit.TERMINATED)
