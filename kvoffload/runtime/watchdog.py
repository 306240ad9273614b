"""Notices pins and copies that outlive what the time-outs allow: a leak, or an engine that has stopped to step."""

from __future__ import annotations

from typing import Protocol

from kvoffload.logs import get_logger
from kvoffload.model.message import Message
from kvoffload.runtime.clocks import Clocks
from kvoffload.telemetry.throttle import AtMostEvery

log = get_logger("watchdog")

_QUIET_S = 60.0  # between two warnings of one kind
_LONGEST_PERIOD_S = 15.0


class Since(Message, frozen=True):
    """When something began. A clock that people set may jump, so ages come from the other.

    Args:
        unix: seconds since 1970, for people.
        monotonic: seconds, for ages.
    """

    unix: float
    monotonic: float


class Watched(Protocol):
    """A source of the oldest pin or job."""

    @property
    def oldest(self) -> Since | None:
        """Start of the oldest, or None. Read from another thread."""


class Watchdog:
    """Looks at the oldest of each now and then, on the observers' loop: an engine's thread that hangs cannot.

    A submitted copy is abandoned in the first step after `timeout_s`; a pin may have waited so long for another request's
    load, and then so long for its own. Half of `timeout_s` more is for a slow step.

    Args:
        pins, jobs: whose oldest is watched.
        timeout_s: `transfer_timeout_s`.
        clocks: where time comes from.
    """

    def __init__(self, pins: Watched, jobs: Watched, timeout_s: float, clocks: Clocks) -> None:
        self._watched = (("pin", pins, 2.5 * timeout_s), ("job", jobs, 1.5 * timeout_s))
        self._period_s = min(timeout_s / 2, _LONGEST_PERIOD_S)
        self._clocks = clocks
        self._due = AtMostEvery(_QUIET_S, clocks.monotonic)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._clocks.sleep(self._period_s)
            self.look()

    def look(self) -> None:
        """Warn of what is too old, at most once a minute for each kind."""
        now = self._clocks.monotonic()
        for kind, one, allowed_s in self._watched:
            since = one.oldest
            if since is None or now - since.monotonic <= allowed_s or self._due.due(kind) is None:
                continue
            keys = {
                "age_s": round(now - since.monotonic, 1),
                "allowed_s": allowed_s,
                "since": round(since.unix),
            }
            log.warning("held_too_long", what=kind, **keys)
