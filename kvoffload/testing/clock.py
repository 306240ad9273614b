"""A clock that only a test advances."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from anyio import wait_all_tasks_blocked

_YIELDS = 16  # loop turns that a woken task usually needs; after them, anyio's check sleeps for 0.1 s


class FakeClock:
    """A clock that only `advance` and `jump` move. The clock serves one asyncio loop; any thread may read it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self._now

    @property
    def sleepers(self) -> int:
        """Number of coroutines that sleep on this clock."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Wake sleepers at their times, and let every task run until it waits again."""
        end = self._now + seconds
        await wait_all_blocked()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now = max(self._now, self._sleepers[0][0])
            self._wake_due()
            await wait_all_blocked()
        self._now = end

    def jump(self, seconds: float) -> None:
        """Let `seconds` pass without waking sleepers; for code that only reads the clock."""
        self._now += seconds

    def _wake_due(self) -> None:
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():  # A cancelled sleeper stays in the heap until its time.
                future.set_result(None)


async def wait_all_blocked() -> None:
    """Return once every other task of the loop is waiting."""
    for _ in range(_YIELDS):
        await asyncio.sleep(0)
    await wait_all_tasks_blocked()
