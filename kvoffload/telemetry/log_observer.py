"""Which events an operator reads of, and how loudly. Nothing that happens in every step is among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod
from typing import TYPE_CHECKING

from kvoffload.logs import get_logger
from kvoffload.model.causes import LoadOutcome, StoreOutcome
from kvoffload.model.events import (
    CapacityGrown,
    CopiesResumed,
    CopiesStalled,
    EngineSurprised,
    Event,
    JobAbandoned,
    LoadEnded,
    NetBenefitTurned,
    ResetEnded,
    ResetStarted,
    StoreSettled,
)
from kvoffload.telemetry.records import to_plain
from kvoffload.telemetry.throttle import AtMostEvery, OncePer

if TYPE_CHECKING:
    import structlog

    from kvoffload.bus.bus import Bus
    from kvoffload.bus.feed import Feed

_QUIET_S = 10.0  # seconds between two warnings of one kind

LOGGED: tuple[type[Event], ...] = (
    JobAbandoned,
    LoadEnded,
    StoreSettled,
    EngineSurprised,
    CapacityGrown,
    CopiesStalled,
    CopiesResumed,
    ResetStarted,
    ResetEnded,
    NetBenefitTurned,
)
"""The classes that can deserve a line."""

_FAILURES = frozenset([LoadOutcome.FAILED, LoadOutcome.CORRUPT, StoreOutcome.FAILED])


def deserves_line(event: Event) -> bool:
    """Return whether anybody would want to read of this event. Costs little: it is asked inline."""
    if isinstance(event, LoadEnded | StoreSettled):
        return event.outcome in _FAILURES
    return isinstance(event, LOGGED)


class LogObserver:
    """Writes log lines; run it behind the feed that `subscribe` returns.

    Args:
        now: the clock that spaces repeated warnings.
        logger: where to; by default kvoffload's own.
    """

    def __init__(self, now: Callable[[], float], logger: structlog.stdlib.BoundLogger | None = None) -> None:
        self._log = logger or get_logger("events")
        self._surprises = OncePer()
        self._warnings = AtMostEvery(_QUIET_S, now)

    def subscribe(self, bus: Bus, capacity: int = 256) -> Feed[Event]:
        """Return a feed of the events that deserve a line.

        They are picked inline, because waking another thread for an event that says nothing costs the engine far
        more than looking at it.
        """
        feed: Feed[Event] = bus.observe("log", (), capacity)

        def pick(event: Event) -> None:
            if deserves_line(event):
                feed.offer(event)

        for cls in LOGGED:
            bus.count(cls, pick)
        return feed

    async def __call__(self, event: Event) -> None:
        """Write what the event deserves, which for most is nothing."""
        if deserves_line(event):
            self._write(event)

    @singledispatchmethod
    def _write(self, event: Event) -> None:
        raise TypeError(f"no line for {type(event).__name__}")

    @_write.register
    def _(self, event: JobAbandoned) -> None:
        self._log.error("job_abandoned", **_keys(event))

    @_write.register
    def _(self, event: LoadEnded) -> None:
        self._warn("load_failed", event.outcome.value, event)

    @_write.register
    def _(self, event: StoreSettled) -> None:
        self._warn("store_failed", event.outcome.value, event)

    @_write.register
    def _(self, event: EngineSurprised) -> None:
        if self._surprises.is_due(event.cause):
            self._log.warning("engine_surprised", **_keys(event), note="further ones are only counted")

    @_write.register
    def _(self, event: CapacityGrown) -> None:
        self._log.info("capacity_grown", **_keys(event))

    @_write.register
    def _(self, event: CopiesStalled) -> None:
        note = "no new copy is begun until some of those that were given up have ended"
        self._log.error("copies_stalled", **_keys(event), note=note)

    @_write.register
    def _(self, event: CopiesResumed) -> None:
        self._log.info("copies_resumed", **_keys(event))

    @_write.register
    def _(self, event: ResetStarted) -> None:
        self._log.info("reset_started", **_keys(event))

    @_write.register
    def _(self, event: ResetEnded) -> None:
        self._log.info("reset_ended", **_keys(event))

    @_write.register
    def _(self, event: NetBenefitTurned) -> None:
        keys = {"net_s": round(event.net_s, 3), "period_s": round(event.period_s, 3)}
        if event.is_negative:
            self._log.warning("net_benefit_negative", **keys, remedy='set min_load_tokens to "auto"')
        else:
            self._log.info("net_benefit_positive", **keys)

    def _warn(self, name: str, kind: str, event: Event) -> None:
        held_back = self._warnings.due((name, kind))
        if held_back is None:
            return
        more = {"held_back": held_back} if held_back else {}
        self._log.warning(name, **_keys(event), **more)


def log_removed(logger: structlog.stdlib.BoundLogger | None = None) -> Callable[[str, Exception], None]:
    """Return the callback that logs a removed observer or counter."""
    log = logger or get_logger("bus")

    def tell(name: str, error: Exception) -> None:
        log.error("observer_removed", name=name, error=repr(error), exc_info=error)

    return tell


def log_spans_failed(
    now: Callable[[], float], logger: structlog.stdlib.BoundLogger | None = None
) -> Callable[[], None]:
    """Return the callback that logs that a collector did not take spans, not too often."""
    log, warnings = logger or get_logger("spans"), AtMostEvery(_QUIET_S, now)

    def tell() -> None:
        held_back = warnings.due("spans")
        if held_back is not None:
            log.warning(
                "spans_not_sent", batches_held_back=held_back, note="is the collector at otlp_endpoint?"
            )

    return tell


def log_journal_failed(logger: structlog.stdlib.BoundLogger | None = None) -> Callable[[Exception], None]:
    """Return the callback that logs the end of the journal's file."""
    log = logger or get_logger("journal")

    def tell(error: Exception) -> None:
        log.error("journal_stopped", error=str(error), note="the engine and the ring in memory go on")

    return tell


def _keys(event: Event) -> dict[str, object]:
    keys = to_plain(event)
    del keys["event"]
    return keys
