"""A clock that stands still until a test advances it."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from anyio import wait_all_tasks_blocked

# A woken task rarely needs more turns of the loop. Fewer turns would cost time, because anyio's check may sleep 0.1 s.
_YIELDS = 16


class FakeClock:
    """A clock that stands still until a test calls `advance` or `jump`.

    Coroutines of one asyncio loop can sleep on the clock, and any thread may read it.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self._now

    @property
    def sleepers(self) -> int:
        """The number of coroutines that are sleeping on the clock."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Advance the clock. Each sleeper wakes at its time, and then all tasks run until they wait again."""
        end = self._now + seconds
        await wait_all_blocked()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now = max(self._now, self._sleepers[0][0])
            self._wake_due()
            await wait_all_blocked()
        self._now = end

    def jump(self, seconds: float) -> None:
        """Advance the clock without waking sleepers, for tests of code that only reads the clock."""
        self._now += seconds

    def _wake_due(self) -> None:
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():  # a cancelled sleeper stays in the heap
                future.set_result(None)


async def wait_all_blocked() -> None:
    """Wait until all other tasks of the asyncio loop are waiting."""
    for _ in range(_YIELDS):
        await asyncio.sleep(0)
    await wait_all_tasks_blocked()
