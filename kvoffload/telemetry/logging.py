"""Logs rare events for operators, such as failed copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

from kvoffload.logs import get_logger
from kvoffload.model.causes import LoadOutcome, StoreOutcome, TierOutcome
from kvoffload.model.events import (
    BreakEvenMoved,
    CopiesResumed,
    CopiesStalled,
    Event,
    FactRejected,
    JobAbandoned,
    LoadEnded,
    NetBenefitTurned,
    PrefixExceedsHost,
    ResetEnded,
    ResetStarted,
    StoreEnded,
    StorePolicyMoved,
    TierCopyEnded,
)
from kvoffload.telemetry.records import summary_of

if TYPE_CHECKING:
    from kvoffload.bus.bus import Bus
    from kvoffload.bus.feed import Feed

QUIET_S = 10.0  # the minimum time between two log lines about the same kind of failure

_LOGGED: Mapping[type[Event], tuple[str, str]] = {
    JobAbandoned: ("error", "job_abandoned"),
    LoadEnded: ("warning", "load_failed"),
    StoreEnded: ("warning", "store_failed"),
    TierCopyEnded: ("warning", "tier_copy_failed"),
    FactRejected: ("warning", "fact_rejected"),
    CopiesStalled: ("error", "copies_stalled"),
    CopiesResumed: ("info", "copies_resumed"),
    PrefixExceedsHost: ("warning", "prefix_exceeds_host"),
    ResetStarted: ("info", "reset_started"),
    ResetEnded: ("info", "reset_ended"),
    NetBenefitTurned: ("warning", "net_benefit_negative"),
    BreakEvenMoved: ("info", "break_even_moved"),
    StorePolicyMoved: ("info", "store_policy_moved"),
}
"""The classes of events that may be logged, each with the level and the name of the log line."""

_NOTES: Mapping[type[Event], Mapping[str, str]] = {
    CopiesStalled: {"note": "no new copy is started until some of the abandoned ones have ended"},
    PrefixExceedsHost: {
        "note": "of such prefixes only the head is fetched from lower tiers; this is logged once",
        "remedy": "raise host_bytes",
    },
}
"""Further fields of log lines."""

_OUTCOMES = LoadEnded | StoreEnded | TierCopyEnded
_FAILURES = {
    *(LoadOutcome.FAILED, LoadOutcome.CORRUPT),
    StoreOutcome.FAILED,
    *(TierOutcome.FAILED, TierOutcome.CORRUPT),
}


class AtMostEvery:
    """Allows one log line per key in each period of `seconds`, and counts the lines that must be held back.

    Args:
        seconds: the minimum time between two lines with the same key.
        now: the clock, in seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds = seconds
        self._now = now
        self._last: dict[Hashable, float] = {}
        self._held_back: dict[Hashable, int] = {}

    def due(self, key: Hashable) -> int | None:
        """Return None if the next line with the given key must be held back.

        Otherwise return the number of lines with the key that were held back since the last allowed line.
        """
        now = self._now()
        last = self._last.get(key)
        if last is not None and now - last < self._seconds:
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return None
        self._last[key] = now
        return self._held_back.pop(key, 0)


class LogObserver:
    """Logs events from the feed that `subscribe` returns.

    Args:
        now: returns the time in seconds, by which repeated warnings are held back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._log = get_logger("events")
        self._violations = AtMostEvery(math.inf, now)
        self._warnings = AtMostEvery(QUIET_S, now)

    def subscribe(self, bus: Bus, capacity: int = 256) -> Feed[Event]:
        """Return a feed with the events to log.

        The engine's thread selects the events, because waking another thread for each event would take more time.
        """
        feed: Feed[Event] = bus.observe("log", capacity)

        def pick(event: Event) -> None:
            if not isinstance(event, _OUTCOMES) or event.outcome in _FAILURES:
                feed.offer(event)

        for cls in _LOGGED:
            bus.count(cls, pick)
        return feed

    async def __call__(self, event: Event) -> None:
        """Log an event, unless it repeats a warning that must be held back."""
        level, name = _LOGGED[type(event)]
        keys = dict(summary_of(event).fields)
        match event:
            case LoadEnded() | StoreEnded() | TierCopyEnded():
                held_back = self._warnings.due((name, event.outcome))
                if held_back is None:
                    return
                keys |= {"held_back": held_back} if held_back else {}
            case FactRejected():
                if self._violations.due(event.cause) is None:
                    return
                keys["note"] = "further ones are only counted"
            case NetBenefitTurned():
                keys = {"net_s": round(event.net_s, 3), "period_s": round(event.period_s, 3)}
                if event.is_negative:
                    keys["remedy"] = 'set min_load_tokens to "auto"'
                else:
                    level, name = "info", "net_benefit_positive"
            case BreakEvenMoved() | StorePolicyMoved():
                keys = _moved(event)
            case _:
                keys |= _NOTES.get(type(event), {})
        getattr(self._log, level)(name, **keys)


def _moved(event: BreakEvenMoved | StorePolicyMoved) -> dict[str, object]:
    """Return what was measured or chosen anew, what it was before, and the reason."""
    if isinstance(event, StorePolicyMoved):
        found = event.found
        shares = " and ".join(
            f"{name} {found[name]:.1%}" for name in (event.policy, event.was) if name in found
        )
        reason = f"of the recent prompts' blocks, {shares} would have been found"
        return {"policy": event.policy, "was": event.was, "reason": reason}
    reason = (
        f"a load takes {1e3 * event.fixed_s:.1f} ms and {1e6 * event.load_s:.1f} us a token; computing takes "
        f"{1e6 * event.compute_s:.1f} us a token and delays {event.delayed:.1f} requests on average"
    )
    return {"tokens": event.tokens, "was": event.was, "reason": reason}


def log_removed(name: str, error: Exception) -> None:
    """Log that the bus removed an observer or a counter, because it raised an exception."""
    get_logger("bus").error("observer_removed", name=name, error=repr(error), exc_info=error)


def log_spans_failed(warnings: AtMostEvery) -> None:
    """Log that the collector did not accept spans, unless `warnings` holds the line back."""
    held_back = warnings.due("spans")
    if held_back is not None:
        note = "is the collector at otlp_endpoint?"
        get_logger("spans").warning("spans_not_sent", batches_held_back=held_back, note=note)
