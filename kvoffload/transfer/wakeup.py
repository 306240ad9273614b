"""Wakes one sleeping coroutine from another thread."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """A flag that a coroutine sleeps on. Waking one that is awake costs an attribute's write and no system call.

    No wake-up is lost: `set` writes the flag before it looks whether the coroutine sleeps, and the coroutine says that it
    sleeps before it looks at the flag.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._sleeper: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self) -> None:
        """Wake the coroutine, or keep it from going to sleep. Callable from any thread."""
        if self._is_set:
            return
        self._is_set = True
        sleeper, loop = self._sleeper, self._loop
        if sleeper is None or loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it went the sleeper
            loop.call_soon_threadsafe(sleeper.set)

    def clear(self) -> None:
        """Lower the flag; done before looking for work, so that work that comes later raises it again."""
        self._is_set = False

    async def wait(self) -> None:
        """Return once the flag is up."""
        self._loop = asyncio.get_running_loop()
        sleeper = asyncio.Event()
        self._sleeper = sleeper
        try:
            if not self._is_set:
                await sleeper.wait()
        finally:
            self._sleeper = None
