"""A coroutine's sleep that another thread ends, without a lock.

The coroutine announces its sleep *before* it looks for work a last time. So either the other thread finds the
announcement or the coroutine finds the work, and no work is missed. At worst the coroutine is woken once without need.

    other thread                 coroutine
    add work                     announce sleep
    asleep? -> wake              is there work? -> do not sleep

While the coroutine is awake, work costs the other thread no system call. Without work neither thread runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Sleeper:
    """The sleep of one coroutine. One other thread adds work, and then calls `wake` if the coroutine is asleep.

    Attributes:
        is_asleep: whether the coroutine sleeps, or is about to.
    """

    def __init__(self) -> None:
        self.is_asleep = False
        self._bell = asyncio.Event()  # bound to the coroutine's loop when the coroutine first sleeps
        self._call: Callable[[Callable[[], None]], object] | None = None

    async def sleep(self, has_work: Callable[[], bool]) -> None:
        """Wait for `wake`, unless there already is work. The caller then looks for work, and may find none."""
        loop = asyncio.get_running_loop()
        # The portal's loop has a way that takes less of the other thread's time.
        self._call = getattr(loop, "call_from_thread", loop.call_soon_threadsafe)
        self._bell.clear()
        self.is_asleep = True
        try:
            if not has_work():
                await self._bell.wait()
        finally:
            self.is_asleep = False

    def wake(self) -> bool:
        """Wake the coroutine, which has announced its sleep. Return False if its loop is closed."""
        # Clear the flag before waking the coroutine, so that later work wakes the coroutine only if it sleeps again.
        self.is_asleep = False
        assert self._call is not None, "asleep without a loop"
        try:
            self._call(self._bell.set)
        except RuntimeError:
            return False
        return True
