"""A bounded feed from the engine's thread to an observer's event loop. The feed never blocks the engine.

Two threads share a feed, without a lock. The producer appends an event and wakes the consumer only if the consumer
sleeps. The consumer announces that it is about to sleep, *then* looks for events once more. So either the producer sees
the announcement or the consumer sees the event, and no event is missed. At worst the consumer is woken once without
need.

    producer                     consumer
    append the event             announce sleep
    asleep? -> wake              anything waiting? -> do not sleep

While the consumer is awake, an event costs the producer one append, however fast events come. Without events neither
thread runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvoffload.bus.guard import call_guarded

T = TypeVar("T")

_TURN = 64  # a consumer that takes one event per call lets the loop's other tasks run after this many events


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
        self._asleep = False
        self._bell = asyncio.Event()  # bound to the consumer's loop when the consumer first sleeps
        self._loop: asyncio.AbstractEventLoop | None = None
        self._overflowed = 0  # only the producer writes this
        self._taken = 0  # only the consumer writes this and `_left`
        self._left = 0

    def offer(self, event: T) -> bool:
        """Add an event without waiting; return False if the feed is closed."""
        if self._closed:
            return False
        if len(self._waiting) >= self.capacity:
            self._overflowed += 1
            return True
        self._waiting.append(event)
        if self._asleep:
            self._wake()
        return True

    async def take(self, most: int = 1) -> list[T]:
        """Wait for events and return up to `most` of the oldest. Return [] once the feed is closed and empty."""
        if self._taken % _TURN == _TURN - 1:  # Consumers that take many events per call await between calls.
            await asyncio.sleep(0)
        while True:
            # Read the flag first, because an event may arrive just before the feed is closed.
            closed = self._closed
            if self._waiting:
                count = min(len(self._waiting), most)
                self._taken += count
                return [self._waiting.popleft() for _ in range(count)]
            if closed:
                return []
            await self._sleep()

    def close(self) -> None:
        """Accept no more events; queued events are still delivered. The producer calls this method."""
        self._closed = True
        if self._asleep:
            self._wake()

    def abandon(self) -> None:
        """Accept no more events and drop queued events. The consumer calls this method when it stops reading."""
        self._closed = True
        self._left += len(self._waiting)
        self._waiting.clear()

    @property
    def dropped(self) -> int:
        """Return the number of events dropped because the feed was full or its consumer had stopped reading."""
        return self._overflowed + self._left

    async def _sleep(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bell.clear()
        self._asleep = True
        try:
            if not self._waiting and not self._closed:
                await self._bell.wait()
        finally:
            self._asleep = False

    def _wake(self) -> None:
        # Clear the flag first, so that later events find the consumer awake. At worst the consumer is woken once
        # without need.
        self._asleep = False
        assert self._loop is not None, "asleep without a loop"
        try:
            self._loop.call_soon_threadsafe(self._bell.set)
        except RuntimeError:  # The loop is closed, so nothing reads the feed any more.
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
            # Abandon the feed even if this task is cancelled, because nothing reads the feed any more.
            feed.abandon()
    except Exception as exc:
        call_guarded(on_removed, feed.name, exc)
