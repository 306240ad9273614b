"""Running asynchronous observers. They share one loop; what one of them awaits holds up nobody but itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvoffload.bus.bus import RemovedCallback
from kvoffload.bus.feed import Feed
from kvoffload.bus.guard import call_guarded

M = TypeVar("M")


async def run_observer(
    feed: Feed[M], observer: Callable[[M], Awaitable[object]], on_removed: RemovedCallback
) -> None:
    """Hand every event of `feed` to `observer` until the feed is closed and empty.

    An observer that raises is removed: its feed takes no more, what waits there is counted as dropped, and
    `on_removed` is told its name and what it raised. While it awaits something, events queue up in its feed and
    then are dropped there.
    """
    try:
        try:
            async for event in feed:
                await observer(event)
        finally:
            feed.abandon()  # also when cancelled: nobody will read on
    except Exception as exc:
        call_guarded(on_removed, feed.name, exc)
