"""The bus: each message reaches its state handler, then inline subscribers, then feeds.

A hook dispatches one fact. The fact's class has exactly one state handler, which runs inline. The handler's events follow
the fact in the same batch, then whatever subscribers publish. Every subscriber sees the messages in that order, and no
handler or subscriber runs inside another. When the batch is over, it is kept whole for the recorder.

One thread dispatches and subscribes: the engine's. Feeds carry messages to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from kvoffload.bus.feed import Feed, FeedStatistics
from kvoffload.bus.guard import call_guarded

M = TypeVar("M")

Handler = Callable[[Any], object]
Batch = tuple[int, float, list[object]]
"""How many messages were published before it, its time, and its messages."""
Recorder = Callable[[list[Batch]], object]
StateErrorCallback = Callable[[Exception, object], object]
RemovedCallback = Callable[[str, Exception], object]


class BusStatistics(NamedTuple):
    """What the bus has done so far."""

    published: int  #: messages dispatched
    state_errors: int  #: exceptions of state handlers
    removed_counters: tuple[str, ...]  #: names of inline subscribers that raised
    feeds: tuple[tuple[str, FeedStatistics], ...]  #: by name, also those no longer read


class EventSource(Protocol):
    """A source of the events that state handlers cause."""

    @property
    def events(self) -> Sequence[object]:
        """The events of single requests and jobs that `take` would return."""

    @property
    def has_sums(self) -> bool:
        """Whether `take` would also return sums over blocks."""

    def take(self) -> Sequence[object]:
        """Return the events, in order, and forget them."""


class _NoEvents:
    """The source of a bus whose handlers leave no events."""

    events = ()
    has_sums = False

    def take(self) -> Sequence[object]:
        return ()


class _Routes(dict[type, tuple[Handler, ...]]):
    """Per message class, its handler, subscribers and feeds, in that order; computed for the first message of a class."""

    def __init__(self, resolve: Callable[[type], tuple[Handler, ...]]) -> None:
        super().__init__()
        self._resolve = resolve

    def __missing__(self, cls: type) -> tuple[Handler, ...]:
        route = self[cls] = self._resolve(cls)
        return route


class Bus:
    """Synchronous publish and subscribe, dispatched by class.

    Args:
        source: of the events that state handlers leave to report; None without any.
    """

    def __init__(self, source: EventSource | None = None) -> None:
        self._source: EventSource = source or _NoEvents()
        self._handlers: dict[type, Handler] = {}
        self._counters: list[tuple[type, Handler]] = []
        self._recorder: Recorder | None = None
        self._now: Callable[[], float] = float
        self._kept: list[Batch] = []
        self._at_a_time = self._record_at = 0
        self._offers: list[tuple[tuple[type, ...], Handler]] = []
        self._feeds: dict[str, Feed[Any]] = {}
        self._routes = _Routes(self._resolve)  # derived from the above, forgotten when it changes
        self._batch: list[object] | None = None
        self._after: list[Callable[[], object]] = []
        self._state_error: StateErrorCallback | None = None
        self._removed: RemovedCallback | None = None
        self._published = self._state_errors = 0
        self._removed_counters: list[str] = []

    def handle(self, cls: type[M], handler: Callable[[M], object]) -> None:
        """Let `handler`, which owns state, react to the messages of exactly this class.

        Raises:
            ValueError: the class has a handler.
        """
        if cls in self._handlers:
            raise ValueError(f"{cls.__name__} has a handler already: {self._handlers[cls]}")
        self._handlers[cls] = handler
        self._routes.clear()

    def drop_handlers(self) -> None:
        """Remove all state handlers and the source of their events; subscribers stay."""
        self._handlers.clear()
        self._source = _NoEvents()
        self._routes.clear()

    def count(self, cls: type[M], counter: Callable[[M], object]) -> None:
        """Call `counter` with every message of `cls` or a subclass; once it raises, never again."""
        self._counters.append((cls, counter))
        self._routes.clear()

    def record(self, recorder: Recorder, now: Callable[[], float], at_a_time: int = 1) -> list[Batch]:
        """Call `recorder` with the batches published since the last call once they have so many messages.

        To keep a batch takes no call of Python, and a recorder that gets many at a time finds its code in the processor's
        caches. A bus has one recorder; once it raises, it is not called again.

        Args:
            recorder: takes the batches and may keep them, but not their list.
            now: the clock that gives each batch its time.
            at_a_time: messages.

        Returns:
            The batches that the recorder will get next, which other threads may copy.
        """
        self._recorder, self._now, self._at_a_time = recorder, now, at_a_time
        self._record_at = self._published + at_a_time
        return self._kept

    def observe(self, name: str, classes: Sequence[type[M]], capacity: int) -> Feed[M]:
        """Return a feed of the messages of `classes`; with no class, one that only its owner fills.

        Raises:
            ValueError: the name is taken, or the capacity is not positive.
        """
        if name in self._feeds:
            raise ValueError(f"feed {name!r} exists already")
        feed: Feed[M] = Feed(name, capacity)
        self._feeds[name] = feed
        self._offers.append((tuple(classes), feed.offer))
        self._routes.clear()
        return feed

    def on_state_error(self, callback: StateErrorCallback) -> None:
        """Call `callback` with what a state handler raised and the message; without one it leaves `publish`."""
        self._state_error = callback

    def on_removed(self, callback: RemovedCallback) -> None:
        """Call `callback` with the name and the exception when an inline subscriber that raised was removed."""
        self._removed = callback

    def afterwards(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, after the current batch was delivered, or at once if there is none."""
        self._after.append(callback)
        if self._batch is None:
            self._run_after()

    def publish(self, message: object) -> None:
        """Dispatch a message, after the current batch if a subscriber publishes it. Never waits."""
        if self._batch is not None:
            self._batch.append(message)
        else:
            self.dispatch([message])

    def dispatch(self, batch: list[Any]) -> None:
        """Dispatch messages and the events they cause, in this order. Must not be called by a subscriber."""
        self._batch, routes, source = batch, self._routes, self._source
        try:
            for message in batch:  # which grows
                for react in routes[type(message)]:
                    try:
                        react(message)
                        if source.events or source.has_sums:
                            batch += source.take()
                    except Exception as exc:
                        self._raised(react, message, exc)
        finally:
            self._batch = None
            before = self._published
            self._published = published = before + len(batch)
        if self._recorder is not None:
            self._kept.append((before, self._now(), batch))
            if published >= self._record_at:
                self._record(self._recorder)
        if self._after:
            self._run_after()

    def statistics(self) -> BusStatistics:
        return BusStatistics(
            published=self._published,
            state_errors=self._state_errors,
            removed_counters=tuple(self._removed_counters),
            feeds=tuple((name, feed.statistics()) for name, feed in self._feeds.items()),
        )

    def close(self) -> None:
        """Close every feed; observers read what is queued, then end."""
        for feed in self._feeds.values():
            feed.close()

    def _raised(self, react: Handler, message: object, exc: Exception) -> None:
        if react is not self._handlers.get(type(message)):
            self._remove(react, exc)
            return
        self._state_errors += 1
        if self._state_error is None:
            raise exc
        call_guarded(self._state_error, exc, message)

    def _record(self, recorder: Recorder) -> None:
        self._record_at = self._published + self._at_a_time
        try:
            recorder(self._kept)
        except Exception as exc:
            self._recorder = None
            self._note_removed(recorder, exc)
        self._kept.clear()

    def _run_after(self) -> None:
        while self._after:
            call_guarded(self._after.pop(0))

    def _resolve(self, cls: type) -> tuple[Handler, ...]:
        handler = [self._handlers[cls]] if cls in self._handlers else []
        subscribers: list[tuple[type | tuple[type, ...], Handler]] = [*self._counters, *self._offers]
        return (*handler, *[each for wanted, each in subscribers if issubclass(cls, wanted)])

    def _remove(self, subscriber: Handler, exc: Exception) -> None:
        self._counters = [entry for entry in self._counters if entry[1] != subscriber]
        self._routes.clear()
        self._note_removed(subscriber, exc)

    def _note_removed(self, subscriber: Handler, exc: Exception) -> None:
        name = getattr(subscriber, "__qualname__", type(subscriber).__qualname__)
        self._removed_counters.append(name)
        if self._removed is not None:
            call_guarded(self._removed, name, exc)
