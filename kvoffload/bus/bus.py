"""The bus: each batch of messages reaches its inline observers, which also fill the feeds of slower observers.

A hook calls the core with a fact, and then dispatches one list of messages: the fact and the core's events. Every
observer gets the messages in this order, and no observer runs inside another. What an observer publishes joins the
current list. At its end, the observers of `Batch` get all messages at once.

An observer that raises is removed and reported, together with the other methods of its object, whose state may be half
updated. The hook and all other observers continue.

Only the engine's thread dispatches and subscribes. Feeds carry messages to other threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

from msgspec import Struct

from kvoffload.bus.current_hook import CurrentHook
from kvoffload.bus.feed import Feed
from kvoffload.bus.guard import call_guarded

M = TypeVar("M")

Observer = Callable[[Any], object]
RemovedCallback = Callable[[str, Exception], object]


class Batch(Struct, frozen=True, gc=False):
    """The messages of one hook, the number of messages before them, and the hook's monotonic time.

    The garbage collector ignores it, as it ignores `Message`.
    """

    before: int
    at: float
    messages: list[Any]


class Tick(Struct, frozen=True):
    """Tells observers now and then to do work that would cost too much after each message. It is no message itself."""


class Bus:
    """Synchronous publish and subscribe, dispatched by class.

    Args:
        hook: the current hook, for observers; by default one with the system's clocks.
    """

    def __init__(self, hook: CurrentHook | None = None) -> None:
        self.hook = hook or CurrentHook()
        self.feeds: dict[str, Feed[Any]] = {}
        """All feeds by name, including closed ones."""
        self.on_removed: RemovedCallback | None = None
        """Called with the name of an observer that raised and was removed, and the exception."""
        self.published = 0
        """How many messages were dispatched."""
        self._routes: defaultdict[type, list[Observer]] = defaultdict(list)
        self._batch: list[Any] | None = None

    def count(self, cls: type[M], observer: Callable[[M], object]) -> None:
        """Call `observer` once with each message of exactly this class. Remove an observer that raises."""
        if observer not in self._routes[cls]:
            self._routes[cls] = [*self._routes[cls], observer]

    def uncount(self, cls: type[M], observer: Callable[[M], object]) -> None:
        """Stop calling `observer` with messages of this class. An observer may remove itself."""
        if observer in (routes := self._routes[cls]):
            self._routes[cls] = [each for each in routes if each != observer]

    def observe(self, name: str, capacity: int) -> Feed[Any]:
        """Return a new feed, which inline observers fill and which closes with the bus."""
        feed = self.feeds[name] = Feed(name, capacity)
        return feed

    def publish(self, message: object) -> None:
        """Dispatch a message. If an observer calls this method, append the message to the current batch."""
        if self._batch is not None:
            self._batch.append(message)
        else:
            self.dispatch([message])

    def dispatch(self, batch: list[Any]) -> None:
        """Pass messages to their observers, then all of them to the observers of `Batch`.

        Observers must call `publish` instead.
        """
        routes = self._routes
        self._batch = batch
        try:
            # `chain` also reaches messages that observers append.
            for message in chain(batch, (Batch(self.published, self.hook.now, batch),)):
                for observe in routes[type(message)]:
                    try:
                        observe(message)
                    except Exception as error:
                        self._remove(observe, error)
        finally:
            self._batch = None
            self.published += len(batch)

    def tick(self) -> None:
        """Pass a `Tick` to its observers. Call this method between two batches."""
        for observe in self._routes[Tick]:
            try:
                observe(Tick())
            except Exception as error:
                self._remove(observe, error)

    def close(self) -> None:
        """Close every feed. Observers end after they have read the queued messages."""
        for feed in self.feeds.values():
            feed.close()

    def _remove(self, observer: Observer, error: Exception) -> None:
        owner = getattr(observer, "__self__", observer)
        for cls, observers in self._routes.items():
            self._routes[cls] = [
                each
                for each in observers
                if each != observer and getattr(each, "__self__", each) is not owner
            ]
        name = getattr(observer, "__qualname__", type(observer).__qualname__)
        if self.on_removed is not None:
            call_guarded(self.on_removed, name, error)
