"""The observers of one engine: each behind a bounded feed, all on the portal's loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import run_observer
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.watchdog import Watchdog
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.journal import Journal
from kvoffload.telemetry.log_observer import LogObserver, log_removed, log_spans_failed
from kvoffload.telemetry.spans import NAME, SpanObserver

_PATIENCE_S = 5.0  # for observers to write what waits when the engine stops


class Observers:
    """Starts what watches the bus, and waits for it at the end.

    Args:
        bus: what they watch.
        journal: its file is written by one of them.
        counters: count the observers that were removed.
        now: monotonic seconds, which space repeated warnings.
        spans: sends spans; None without a collector.
    """

    def __init__(
        self,
        bus: Bus,
        journal: Journal,
        counters: Counters,
        now: Callable[[], float],
        spans: SpanObserver | None = None,
    ) -> None:
        self._bus = bus
        self._journal = journal
        self._counters = counters
        self._now = now
        self._spans = spans
        self._executor: Executor | None = None
        self._portal: Portal | None = None
        self._running: list[Future[None]] = []
        self._watching: Future[None] | None = None
        self._log_removed = log_removed()
        bus.on_removed(self._removed)

    def start(self, portal: Portal, watchdog: Watchdog) -> None:
        """Run the observers on the portal's loop until the bus is closed, and the watchdog beside them."""
        log = LogObserver(self._now)
        self._portal = portal
        self._running = [
            portal.spawn(run_observer, log.subscribe(self._bus), log, self._removed),
            portal.spawn(self._journal.run),
        ]
        if self._spans is not None:
            self._start_spans(portal, self._spans)
        self._watching = portal.spawn(watchdog.run)

    def wait(self) -> None:
        """Give the observers a moment to finish; the bus must be closed."""
        if self._watching is not None:
            self._watching.cancel()
        if self._portal is not None and self._portal.is_alive:
            for running in self._running:
                with suppress(Exception):  # why one ended early was logged when it did
                    running.result(_PATIENCE_S)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _start_spans(self, portal: Portal, spans: SpanObserver) -> None:
        """On a separate thread: a collector that does not answer blocks it."""
        log_failed = log_spans_failed(self._now)

        def failed() -> None:
            self._counters.spans_failed()
            log_failed()

        spans.subscribe(self._bus, failed)
        self._executor = portal.new_executor(NAME)
        self._running.append(portal.spawn(spans.run, self._executor, self._removed))

    def _removed(self, name: str, error: Exception) -> None:
        self._counters.removed(name)
        self._log_removed(name, error)
