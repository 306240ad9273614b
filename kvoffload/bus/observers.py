"""Asynchronous observers. They share one loop; an observer that waits delays only itself."""

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

    An observer that raises is removed: its feed closes, queued events count as dropped, and `on_removed` gets its
    name and the exception. While it waits, events queue up in its feed; once the feed is full they are dropped.
    """
    try:
        try:
            async for event in feed:
                await observer(event)
        finally:
            feed.abandon()  # also when cancelled: the feed has no reader any more
    except Exception as exc:
        call_guarded(on_removed, feed.name, exc)
