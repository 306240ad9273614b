"""Observes one engine. Counters and measurements run in hooks; other observers run on the portal's loop."""

from __future__ import annotations

from collections.abc import Set
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf

from kvoffload.bus.bus import Batch, Bus, Tick
from kvoffload.bus.feed import run_observer
from kvoffload.logs import get_logger
from kvoffload.model.causes import DegradeCause
from kvoffload.model.config import AUTO, OffloadConfig
from kvoffload.model.engine import EngineIdentity, EngineShape
from kvoffload.model.events import HitDropped, HitPinned, LoadEnded, LoadScheduled, OffloadingDegraded
from kvoffload.model.ids import RequestId
from kvoffload.model.wire import Tier
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.predictions import Predictions
from kvoffload.runtime.step_times import FirstTokens
from kvoffload.telemetry.capacity import CapacityCurve, sample, sizes_of
from kvoffload.telemetry.catalogue import Side, Subscriber, subscriber_label
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.journal import Journal
from kvoffload.telemetry.logging import QUIET_S, AtMostEvery, LogObserver, log_removed, log_spans_failed
from kvoffload.telemetry.policies import PolicyChoice
from kvoffload.telemetry.provenance import describe_run, info_labels
from kvoffload.telemetry.spans import NAME, SpanObserver, make_spans
from kvoffload.transfer.ports import Clocks

log = get_logger("scheduler")

_PATIENCE_S = 5.0  # how many seconds a stopping engine waits for each observer's pending output
_TAIL = 20  # how many lines of the journal are logged when offloading is switched off


class Observation:
    """The observers of one engine. With the store policy `auto`, one of them chooses how blocks are stored.

    Args:
        bus: the bus to observe.
        shape: the engine's fixed properties.
        config: the operator's settings.
        identity: the engine's identity.
        clocks: provides wall time for spans, and monotonic time for limiting repeated warnings.
        tiers: the engine's tiers below the host.

    Raises:
        ConfigError: the journal's file cannot be written, or a package that spans need is not installed.
    """

    def __init__(
        self,
        bus: Bus,
        shape: EngineShape,
        config: OffloadConfig,
        identity: EngineIdentity,
        clocks: Clocks,
        tiers: Set[Tier],
    ) -> None:
        self._bus = bus
        self._shape = shape
        self._config = config
        self._clocks = clocks
        self._now = clocks.monotonic
        self.info = info_labels(identity, config, shape.ranks // shape.sharers)
        self.spans = make_spans(config, shape, clocks.unix)
        self.journal = Journal(
            bus.hook,
            path=config.journal_path,
            max_bytes=config.journal_max_bytes,
            provenance=describe_run(identity, shape, config, clocks.unix()),
            on_failure=self._journal_failed,
        )
        self.counters = Counters(tiers)
        self.counters.subscribe(bus)
        self.pins = PinAges(bus)
        self.curve: CapacityCurve | None = None
        self.journal.subscribe(bus)
        self._first_tokens = FirstTokens(bus)
        self._unreadable = AtMostEvery(inf, clocks.monotonic)  # the metrics whose reader raised
        self._portal: Portal | None = None
        self._running: list[Future[None]] = []
        bus.count(OffloadingDegraded, self._degraded)
        bus.on_removed = self.removed

    def start(self, portal: Portal, side: Side) -> None:
        """Start the observers on the portal's loop. They run until the bus is closed.

        Args:
            portal: runs the observers.
            side: the scheduler side, whose tiers' sizes and metrics the predictions use.
        """
        log_observer = LogObserver(self._now)
        self._portal = portal
        self._running = [
            portal.spawn(run_observer, log_observer.subscribe(self._bus), log_observer, self.removed),
            portal.spawn(self.journal.run),
        ]
        if self.spans is not None:
            self._start_spans(portal, self.spans)
        self._predictions = self._predict(side)
        self._predicting = portal.spawn(self._predictions.run, self.removed)

    def _predict(self, side: Side) -> Predictions:
        self.curve = CapacityCurve(self._shape, self._config, partial(sizes_of, side), self._now)
        if self._config.store_policy == AUTO and self.curve.choice is not None:
            self._bus.count(Tick, partial(_follow, self.curve.choice, side))
        sampled = partial(sample, side, self.counters, self.reader_failed)
        is_recorded = self._config.journal_path is not None
        return Predictions(self.curve, self._bus, sampled if is_recorded else None, self._clocks.sleep)

    def finish(self) -> None:
        """Publish the last predictions for the journal. Call this method before closing the bus."""
        if self._portal is not None and self._portal.is_alive and self._config.journal_path is not None:
            with suppress(Exception):  # the run is over, so a sample that fails costs only itself
                self._portal.spawn(self._predictions.refresh).result(_PATIENCE_S)
                self._predictions.publish()

    def wait(self) -> None:
        """Wait a few seconds for each observer to end. Call this method after closing the bus."""
        if self._portal is not None and self._portal.is_alive:
            self._predicting.cancel()
            for running in self._running:
                with suppress(Exception):  # An observer's failure was logged when it happened.
                    running.result(_PATIENCE_S)

    def _start_spans(self, portal: Portal, spans: SpanObserver) -> None:
        """Export spans on a separate thread, because a collector that does not answer would block the loop."""
        warnings = AtMostEvery(QUIET_S, self._now)

        def failed() -> None:
            self.counters.add("kvoffload_span_export_errors_total")
            log_spans_failed(warnings)

        spans.subscribe(self._bus, failed)
        executor = portal.new_executor(NAME)
        running = portal.spawn(spans.run, executor, self.removed)
        running.add_done_callback(lambda _: executor.shutdown(wait=False))
        self._running.append(running)

    def _degraded(self, _: OffloadingDegraded) -> None:
        # At the end of the batch, the journal contains the events that led to this one.
        self._bus.count(Batch, self._log_degradation)

    def _log_degradation(self, batch: Batch) -> None:
        self._bus.uncount(Batch, self._log_degradation)
        for event in batch.messages:
            if isinstance(event, OffloadingDegraded):
                journal = self.journal.tail(_TAIL)
                log.error("offloading_off", cause=event.cause.value, detail=event.detail, journal=journal)

    def removed(self, name: str, error: Exception) -> None:
        """Count and log an observer that raised and is not called any more."""
        self.counters.add("kvoffload_bus_removed_total", subscriber_label(name))
        log_removed(name, error)
        if name.startswith(PinAges.__name__):
            self.pins.oldest = None  # a pin that nothing observes would seem to last until the engine's end

    def reader_failed(self, metric: str, error: Exception) -> None:
        """Report a metric that cannot be read, once. Any thread may call this method."""
        if self._unreadable.due(metric) is not None:
            self.removed(f"{Subscriber.GAUGES.value}.{metric}", error)

    def _journal_failed(self, error: Exception) -> None:
        self.counters.add("kvoffload_journal_write_errors_total")
        log.error("journal_stopped", error=str(error), note="the engine and the ring in memory continue")


def _follow(choice: PolicyChoice, side: Side, _: Tick) -> None:
    """Use the store policy that `choice` names."""
    if choice.chosen is not None and choice.chosen != side.core.store_policy:
        side.choose_policy(choice.chosen, choice.found())


class PinAges:
    """Records since when host slots have been pinned for each request's hit or load.

    Args:
        bus: the bus to observe.

    Attributes:
        oldest: when the oldest pin began, in monotonic seconds; None without pins. Any thread may read it.
    """

    def __init__(self, bus: Bus) -> None:
        self._hook = bus.hook
        self._since: dict[RequestId, float] = {}  # the oldest pin first
        self.oldest: float | None = None
        bus.count(HitPinned, self._pinned)
        bus.count(LoadScheduled, self._pinned)
        bus.count(HitDropped, self._unpinned)
        bus.count(LoadEnded, self._unpinned)
        bus.count(OffloadingDegraded, self._degraded)

    def _pinned(self, event: HitPinned | LoadScheduled) -> None:
        if event.request not in self._since:
            self._since[event.request] = self._hook.now
            if self.oldest is None:
                self.oldest = self._hook.now

    def _unpinned(self, event: HitDropped | LoadEnded) -> None:
        self._since.pop(event.request, None)
        self.oldest = next(iter(self._since.values()), None)

    def _degraded(self, event: OffloadingDegraded) -> None:
        """Forget all pins of a core that raised, which publishes no more events."""
        if event.cause is DegradeCause.HANDLER_RAISED:
            self._since.clear()
            self.oldest = None
