"""The bus: who hears of what, and in which order.

Order of one message: state handlers, then counters, then feeds; each kind in the order of registration, whichever class
of the message's ancestry they were registered for. A message published from inside a handler waits until the one
being dispatched has reached everybody, then follows in the order of publication (breadth first). So every handler
sees every message in the same order, and a handler never runs inside another. `publish` on the outside returns when
all of that has been dispatched.

One thread publishes and subscribes: the engine's. Feeds carry events to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvoffload.bus.feed import Feed, FeedStatistics
from kvoffload.bus.guard import call_guarded

M = TypeVar("M")

Handler = Callable[[Any], object]
StateErrorCallback = Callable[[Exception, object], object]
RemovedCallback = Callable[[str, Exception], object]


class BusStatistics(NamedTuple):
    """What the bus has done so far."""

    published: int  #: messages that somebody had subscribed to
    waiting: int  #: messages published and not dispatched yet
    state_errors: int  #: exceptions of state handlers
    removed_counters: tuple[str, ...]  #: names of counters that raised
    feeds: tuple[tuple[str, FeedStatistics], ...]  #: by name, also those no longer read


class _Route(NamedTuple):
    """Everybody who hears of one class."""

    handlers: tuple[Handler, ...]
    counters: tuple[Handler, ...]
    feeds: tuple[Feed[Any], ...]


_NOBODY = _Route((), (), ())


class Bus:
    """Synchronous publish and subscribe, dispatched by class."""

    def __init__(self) -> None:
        self._handlers: list[tuple[type, Handler]] = []
        self._counters: list[tuple[type, Handler]] = []
        self._observers: list[tuple[tuple[type, ...], Feed[Any]]] = []
        self._feeds: dict[str, Feed[Any]] = {}
        self._routes: dict[type, _Route] = {}  # derived from the three lists, forgotten when one changes
        self._queue: deque[object] = deque()
        self._dispatching = False
        self._state_error: StateErrorCallback | None = None
        self._removed: RemovedCallback | None = None
        self._published = self._state_errors = 0
        self._removed_counters: list[str] = []

    def on(self, cls: type[M], handler: Callable[[M], object]) -> None:
        """Call `handler`, which owns state, with every message of `cls` or a subclass."""
        self._handlers.append((cls, handler))
        self._routes.clear()

    def drop_handlers(self) -> None:
        """Call no state handler any more; counters and feeds stay."""
        self._handlers.clear()
        self._routes.clear()

    def count(self, cls: type[M], counter: Callable[[M], object]) -> None:
        """Call `counter` with every message of `cls`, after the state handlers; once it raises, never again."""
        self._counters.append((cls, counter))
        self._routes.clear()

    def observe(self, name: str, classes: Sequence[type[M]], capacity: int) -> Feed[M]:
        """Return a feed of the messages of `classes`; with no class, one that only its owner fills.

        Raises:
            ValueError: the name is taken, or the capacity is not positive.
        """
        if name in self._feeds:
            raise ValueError(f"feed {name!r} exists already")
        feed: Feed[M] = Feed(name, capacity)
        self._feeds[name] = feed
        self._observers.append((tuple(classes), feed))
        self._routes.clear()
        return feed

    def on_state_error(self, callback: StateErrorCallback) -> None:
        """Call `callback` when a state handler raises, after which the remaining handlers still run.

        Without a callback the exception leaves `publish` at once: an error that nobody hears of is worse.
        """
        self._state_error = callback

    def on_removed(self, callback: RemovedCallback) -> None:
        """Call `callback` with the name and the exception when a counter that raised was removed."""
        self._removed = callback

    def publish(self, message: object) -> None:
        """Tell everybody who subscribed to the message's class. Never waits."""
        route = self._routes.get(type(message))
        if route is None:
            route = self._resolve(type(message))
        if route is _NOBODY:
            return
        queue = self._queue
        if self._dispatching:
            queue.append(message)
            return
        self._dispatching = True
        try:
            if queue:  # a state handler's exception left them
                queue.append(message)
            else:
                self._dispatch(message, route)
            while queue:
                message = queue.popleft()
                self._dispatch(message, self._routes.get(type(message)) or self._resolve(type(message)))
        finally:
            self._dispatching = False

    def statistics(self) -> BusStatistics:
        return BusStatistics(
            published=self._published,
            waiting=len(self._queue),
            state_errors=self._state_errors,
            removed_counters=tuple(self._removed_counters),
            feeds=tuple((name, feed.statistics()) for name, feed in self._feeds.items()),
        )

    def close(self) -> None:
        """Close every feed: their observers take what waits and end."""
        for feed in self._feeds.values():
            feed.close()

    def _dispatch(self, message: object, route: _Route) -> None:
        self._published += 1
        handlers, counters, feeds = route
        for handler in handlers:
            try:
                handler(message)
            except Exception as exc:
                self._handle_state_error(exc, message)
        for counter in counters:
            try:
                counter(message)
            except Exception as exc:
                self._remove_counter(counter, exc)
        for feed in feeds:
            if not feed.offer(message):
                self._forget(feed)

    def _resolve(self, cls: type) -> _Route:
        route = _Route(
            handlers=tuple(handler for wanted, handler in self._handlers if issubclass(cls, wanted)),
            counters=tuple(counter for wanted, counter in self._counters if issubclass(cls, wanted)),
            feeds=tuple(feed for wanted, feed in self._observers if issubclass(cls, wanted)),
        )
        self._routes[cls] = route if any(route) else _NOBODY
        return self._routes[cls]

    def _handle_state_error(self, exc: Exception, message: object) -> None:
        self._state_errors += 1
        if self._state_error is None:
            raise exc
        call_guarded(self._state_error, exc, message)

    def _remove_counter(self, counter: Handler, exc: Exception) -> None:
        name = getattr(counter, "__qualname__", type(counter).__qualname__)
        self._counters = [entry for entry in self._counters if entry[1] != counter]
        self._removed_counters.append(name)
        self._routes.clear()
        if self._removed is not None:
            call_guarded(self._removed, name, exc)

    def _forget(self, feed: Feed[Any]) -> None:
        """Stop offering to a feed that nobody reads; its numbers stay in the statistics."""
        self._observers = [entry for entry in self._observers if entry[1] is not feed]
        self._routes.clear()
