"""A bounded feed from the engine's thread to an observer's event loop. The feed never blocks the engine.

Two threads share a feed without a lock. The producer appends an event, and wakes the consumer if the consumer sleeps
(`sleeper.py`). While the consumer is awake, an event costs the producer one append.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvoffload.bus.guard import call_guarded
from kvoffload.bus.sleeper import Sleeper

T = TypeVar("T")

_TURN = 64  # after this many events, a consumer that takes one event per call lets other tasks run


class Feed(Generic[T]):
    """Events from one producer's thread to one consumer's task.

    When the feed is full, new events are dropped and counted.

    Args:
        name: the observer's name.
        capacity: the maximum number of waiting events.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._waiting: deque[T] = deque()
        self._closed = False
        self._sleeper = Sleeper()
        self._overflowed = 0  # written only by the producer
        self._taken = 0  # `_taken` and `_left` are written only by the consumer
        self._left = 0

    def offer(self, event: T) -> bool:
        """Add an event without waiting; return False if the feed is closed."""
        if self._closed:
            return False
        if len(self._waiting) >= self.capacity:
            self._overflowed += 1
            return True
        self._waiting.append(event)
        if self._sleeper.is_asleep:
            self._wake()
        return True

    async def take(self, most: int = 1) -> list[T]:
        """Wait for events and return up to `most` of the oldest; [] if the feed is closed and empty."""
        if self._taken % _TURN == _TURN - 1:  # Only consumers that take one event per call need this pause.
            await asyncio.sleep(0)
        while True:
            # Read the flag before the queue, because an event may arrive just before the feed is closed.
            closed = self._closed
            if self._waiting:
                count = min(len(self._waiting), most)
                self._taken += count
                return [self._waiting.popleft() for _ in range(count)]
            if closed:
                return []
            await self._sleeper.sleep(self._has_changed)

    def close(self) -> None:
        """Accept no more events, but deliver the queued ones. Only the producer may call this method."""
        self._closed = True
        if self._sleeper.is_asleep:
            self._wake()

    def abandon(self) -> None:
        """Accept no more events, and drop the queued ones. Only the consumer may call this method."""
        self._closed = True
        self._left += len(self._waiting)
        self._waiting.clear()

    @property
    def dropped(self) -> int:
        """Return how many events were dropped because the feed was full or the consumer stopped reading."""
        return self._overflowed + self._left

    def _has_changed(self) -> bool:
        return bool(self._waiting) or self._closed

    def _wake(self) -> None:
        if not self._sleeper.wake():  # The loop is closed, so nothing reads the feed any more.
            self.abandon()


async def run_observer(
    feed: Feed[T], observer: Callable[[T], Awaitable[object]], on_removed: Callable[[str, Exception], object]
) -> None:
    """Pass every event of `feed` to `observer` until the feed is closed and empty.

    An observer that raises is removed: its feed closes, queued events count as dropped, and `on_removed` gets its name
    and the exception. While `observer` runs, new events wait in the feed; once the feed is full, further events are
    dropped.
    """
    try:
        try:
            while events := await feed.take():
                await observer(events[0])
        finally:
            # Nothing reads the feed any more, even after a cancellation.
            feed.abandon()
    except Exception as exc:
        call_guarded(on_removed, feed.name, exc)
