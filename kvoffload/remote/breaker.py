"""A circuit breaker: a store that fails is left alone, and tried again by single calls.

CLOSED ─3 failures in a row, or 1 hang─▶ OPEN ─pause─▶ one probe ─it worked─▶ ON TRIAL ─1 answer─▶ CLOSED
                                          ▲                 └─it failed─▶ OPEN      └─1 failure─▶ OPEN

The pause doubles each time, until a call is answered that is no probe. A probe alone shows little: a store's master may answer it
and name values that its dead nodes do not deliver, and each call for them costs a request its wait.
"""

from __future__ import annotations

_MOST_FAILURES = 3  # in a row
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Breaker:
    """The breaker of one store. Every method takes the time now, in seconds.

    Args:
        is_closed: calls are made; a store that was never reached begins with a probe.
    """

    def __init__(self, *, is_closed: bool = False) -> None:
        self.is_closed = is_closed
        """Calls are made."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._probe_at = 0.0
        self._is_probing = False

    def worked(self, *, is_probe: bool = False) -> None:
        """A call was answered."""
        self._failures = 0
        if is_probe:
            self.is_closed, self._is_probing = True, False
        else:
            self._pause_s = _FIRST_PAUSE_S

    def failed(self, now: float, *, is_probe: bool = False, hangs: bool = False) -> None:
        """A call failed, or has not returned in time."""
        self._failures += 1
        if is_probe:
            self._is_probing = False
        is_on_trial = self._pause_s > _FIRST_PAUSE_S  # since the breaker was open only probes were answered
        if is_probe or (self.is_closed and (hangs or is_on_trial or self._failures >= _MOST_FAILURES)):
            self.is_closed, self._failures = False, 0
            self._probe_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def takes_probe(self, now: float) -> bool:
        """Whether a probe is due; if so, the caller must make it."""
        if self.is_closed or self._is_probing or now < self._probe_at:
            return False
        self._is_probing = True
        return True
