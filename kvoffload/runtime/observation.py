"""Observes one engine. Counters and measurements run in hooks; other observers run on the portal's loop."""

from __future__ import annotations

from collections.abc import Mapping, Set
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import run_observer
from kvoffload.logs import get_logger
from kvoffload.model.causes import RemoteFault
from kvoffload.model.config import OffloadConfig
from kvoffload.model.engine import EngineIdentity, EngineShape
from kvoffload.model.events import OffloadingDegraded
from kvoffload.model.facts import TransferReported
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Tier, TransferReport
from kvoffload.runtime.copies import HookTime
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.step_times import FirstTokens
from kvoffload.telemetry.catalogue import subscriber_label
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.journal import Journal
from kvoffload.telemetry.logging import QUIET_S, AtMostEvery, LogObserver, log_removed, log_spans_failed
from kvoffload.telemetry.provenance import describe_run, info_labels
from kvoffload.telemetry.spans import NAME, SpanObserver, make_spans
from kvoffload.transfer.ports import Clocks

log = get_logger("scheduler")

_PATIENCE_S = 5.0  # how many seconds a stopping engine waits for each observer's pending output
_TAIL = 20  # how many lines of the journal are logged when offloading is switched off


class Observation:
    """The observers of one engine. Observers do not influence which blocks are stored, found or copied.

    Args:
        bus: the bus to observe.
        shape: the engine's fixed properties.
        config: the operator's settings.
        identity: the engine's identity.
        hook: the current hook's time.
        clocks: provides wall time for the journal and spans, and monotonic time for limiting repeated warnings.

    Raises:
        ConfigError: the journal's file cannot be written, or a package that spans need is not installed.
    """

    def __init__(
        self,
        bus: Bus,
        shape: EngineShape,
        config: OffloadConfig,
        identity: EngineIdentity,
        hook: HookTime,
        clocks: Clocks,
        tiers: Set[Tier],
    ) -> None:
        self._bus = bus
        self._now = clocks.monotonic
        self.info = info_labels(identity, config)
        self.spans = make_spans(config, shape, clocks.unix)
        self.journal = Journal(
            clocks.unix,
            path=config.journal_path,
            max_bytes=config.journal_max_bytes,
            provenance=describe_run(identity, shape, config, clocks.unix()),
            on_failure=self._journal_failed,
        )
        self.counters = Counters(tiers)
        self.counters.subscribe(bus)
        self.reports = {rank: TransferReport(rank, (), 0) for rank in map(Rank, range(shape.ranks))}
        """Each rank's last report. Any thread may read it."""
        self.remote_faults: Mapping[RemoteFault, int] = {}
        """Failed calls of the scheduler's side to the remote tier. Ranks report their own failed calls."""
        bus.count(TransferReported, self._reported)
        self.journal.subscribe(bus)
        self.first_tokens = FirstTokens(hook, bus)
        self._portal: Portal | None = None
        self._running: list[Future[None]] = []
        self.saw_degradation = False
        """True after `OffloadingDegraded` was published."""
        bus.count(OffloadingDegraded, self._degraded)
        bus.on_removed = self._removed

    def start(self, portal: Portal) -> None:
        """Start the observers on the portal's loop. They run until the bus is closed."""
        log_observer = LogObserver(self._now)
        self._portal = portal
        self._running = [
            portal.spawn(run_observer, log_observer.subscribe(self._bus), log_observer, self._removed),
            portal.spawn(self.journal.run),
        ]
        if self.spans is not None:
            self._start_spans(portal, self.spans)

    def wait(self) -> None:
        """Wait a few seconds for each observer to end. Call this method after closing the bus."""
        if self._portal is not None and self._portal.is_alive:
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
        running = portal.spawn(spans.run, executor, self._removed)
        running.add_done_callback(lambda _: executor.shutdown(wait=False))
        self._running.append(running)

    def _reported(self, fact: TransferReported) -> None:
        if fact.report.rank in self.reports:
            self.reports[fact.report.rank] = fact.report

    def _degraded(self, event: OffloadingDegraded) -> None:
        self.saw_degradation = True
        # Log after the batch, when the journal contains the events that led to this one.
        self._bus.afterwards(partial(self._log_degradation, event))

    def _log_degradation(self, event: OffloadingDegraded) -> None:
        journal = self.journal.tail(_TAIL)
        log.error("offloading_off", cause=event.cause.value, detail=event.detail, journal=journal)

    def _removed(self, name: str, error: Exception) -> None:
        self.counters.add("kvoffload_bus_removed_total", subscriber_label(name))
        log_removed(name, error)

    def _journal_failed(self, error: Exception) -> None:
        self.counters.add("kvoffload_journal_write_errors_total")
        log.error("journal_stopped", error=str(error), note="the engine and the ring in memory continue")
