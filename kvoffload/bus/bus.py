"""The bus: each message reaches its inline handlers, which fill the feeds of observers.

A hook dispatches one fact. The first handler of the fact's class owns the state that the fact changes. In the same
batch, the fact is followed by its events, then by messages that other handlers publish. Every subscriber gets the
messages in this order, and no handler runs inside another. The journal gets lists of whole batches instead of messages.

Only the engine's thread dispatches and subscribes. Feeds carry messages to other threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from kvoffload.bus.feed import Feed
from kvoffload.bus.guard import call_guarded
from kvoffload.core.tally import Tally

M = TypeVar("M")

Handler = Callable[[Any], object]
Batch = tuple[int, float, list[object]]
"""A batch: the number of messages published before it, its time, and its messages."""
Keeper = Callable[[list[Batch]], object]
StateErrorCallback = Callable[[Exception, object], object]
RemovedCallback = Callable[[str, Exception], object]


class Bus:
    """Synchronous publish and subscribe, dispatched by class.

    Args:
        tally: collects the events that state handlers cause.
    """

    def __init__(self, tally: Tally | None = None) -> None:
        self.feeds: dict[str, Feed[Any]] = {}
        """All feeds by name, including closed ones."""
        self.published = 0
        """How many messages were dispatched."""
        self._tally = tally or Tally(())
        self._handlers: dict[type, Handler] = {}
        self._routes: defaultdict[type, list[Handler]] = defaultdict(list)
        """The handlers to call for each message class. The first handler owns the state that the messages change."""
        self._keeper: Keeper | None = None
        self._now: Callable[[], float] = float  # the clock passed to `keep`
        self._kept: list[Batch] = []
        self._at_a_time = 0
        self._batch: list[object] | None = None
        self._after: list[Callable[[], object]] = []
        self.on_state_error: StateErrorCallback | None = None
        """Called with a state handler's exception and the message. If None, `dispatch` raises the exception."""
        self.on_removed: RemovedCallback | None = None
        """Called with the name of a subscriber that raised and was removed, and the exception."""

    def handle(self, cls: type[M], handler: Callable[[M], object]) -> None:
        """Register the state handler for messages of exactly this class.

        Raises:
            ValueError: the class already has a state handler.
        """
        if cls in self._handlers:
            raise ValueError(f"{cls.__name__} has a handler already: {self._handlers[cls]}")
        self._handlers[cls] = handler
        self._routes[cls].insert(0, handler)

    def drop_handlers(self) -> None:
        """Remove all state handlers and the tally of their events. All other subscribers stay."""
        for cls, handler in self._handlers.items():
            self._routes[cls].remove(handler)
        self._handlers.clear()
        self._tally = Tally(())

    def count(self, cls: type[M], counter: Callable[[M], object]) -> None:
        """Call `counter` after the state handler, for messages of exactly this class. Remove a counter that raises."""
        self._routes[cls].append(counter)

    def keep(self, keeper: Keeper, now: Callable[[], float], at_a_time: int = 1) -> list[Batch]:
        """Pass all later batches to `keeper`. Remove a keeper that raises.

        Args:
            keeper: called with a list of batches, which is cleared afterwards.
            now: the clock that gives each batch its time.
            at_a_time: how many messages to collect before each call of `keeper`, which is faster with many batches at
                once.

        Returns:
            The list of collected batches, which other threads may copy.
        """
        self._keeper = keeper
        self._now = now
        self._at_a_time = at_a_time
        return self._kept

    def observe(self, name: str, capacity: int) -> Feed[Any]:
        """Return a new feed, which handlers fill and which closes with the bus."""
        feed = self.feeds[name] = Feed(name, capacity)
        return feed

    def afterwards(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, after the current batch is delivered. If there is no batch, call it immediately."""
        self._after.append(callback)
        if self._batch is None:
            self._run_after()

    def publish(self, message: object) -> None:
        """Dispatch a message. If a subscriber calls this method, append the message to the current batch."""
        if self._batch is not None:
            self._batch.append(message)
        else:
            self.dispatch([message])

    def dispatch(self, batch: list[Any]) -> None:
        """Dispatch messages, and after them the events that they cause. Subscribers must call `publish` instead."""
        self._batch = batch
        routes = self._routes
        tally = self._tally
        try:
            for message in batch:  # The loop reaches messages that handlers append to the batch.
                for react in routes[type(message)]:
                    try:
                        react(message)
                        if tally.events or tally.has_sums:
                            batch += tally.take()
                    except Exception as exc:
                        self._raised(react, message, exc)
        finally:
            self._batch = None
            before = self.published
            self.published = before + len(batch)
        if self._keeper is not None:
            self._kept.append((before, self._now(), batch))
            if self.published - self._kept[0][0] >= self._at_a_time:
                self._hand_on(self._keeper)
        if self._after:
            self._run_after()

    def close(self) -> None:
        """Close every feed. Observers end after they have read the queued messages."""
        for feed in self.feeds.values():
            feed.close()

    def _raised(self, react: Handler, message: object, exc: Exception) -> None:
        if react is not self._handlers.get(type(message)):
            self._remove(react, exc)
            return
        if self.on_state_error is None:
            raise exc
        call_guarded(self.on_state_error, exc, message)

    def _hand_on(self, keeper: Keeper) -> None:
        try:
            keeper(self._kept)
        except Exception as exc:
            self._keeper = None
            self._remove(keeper, exc)
        self._kept.clear()

    def _run_after(self) -> None:
        while self._after:
            call_guarded(self._after.pop(0))

    def _remove(self, subscriber: Callable[..., object], exc: Exception) -> None:
        for cls, reacting in self._routes.items():
            self._routes[cls] = [react for react in reacting if react != subscriber]
        name = getattr(subscriber, "__qualname__", type(subscriber).__qualname__)
        if self.on_removed is not None:
            call_guarded(self.on_removed, name, exc)
