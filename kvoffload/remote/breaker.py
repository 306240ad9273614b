"""A circuit breaker: a store that fails is left alone, and tried again by single calls.

CLOSED ─3 failures in a row, or 1 hang─▶ OPEN ─pause─▶ one probe ─it worked─▶ ON TRIAL ─1 value read─▶ CLOSED
                                          ▲                 └─it failed─▶ OPEN      └─1 failure─▶ OPEN

A connection that has ended counts as a hang. The pause doubles each time, until a read is answered that is no probe, and is at least four times what the failed call took: requests
wait for such calls, so a store that fails takes at most a fifth of their time. A read that is answered ends the row of failed reads, a
write that of failed writes. A probe or a write that is answered shows little: a store's master alone may answer both, and name values
that its dead nodes do not deliver.
"""

from __future__ import annotations

_MOST_FAILURES = 3  # in a row
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_PAUSE_PER_CALL = 4  # of what the failed call took


class Breaker:
    """The breaker of one store. Every method takes the time now, in seconds.

    Args:
        is_closed: calls are made; a store that was never reached begins with a probe.
    """

    def __init__(self, *, is_closed: bool = False) -> None:
        self.is_closed = is_closed
        """Calls are made."""
        self._failures = [0, 0]  # of reads since one worked, and of writes
        self._pause_s = _FIRST_PAUSE_S
        self._probe_at = 0.0
        self._is_probing = False

    def worked(self, *, is_probe: bool = False, is_write: bool = False) -> None:
        """A call was answered."""
        self._failures[is_write] = 0
        if is_probe:
            self.is_closed = True
            self._is_probing = False
        elif not is_write:
            self._pause_s = _FIRST_PAUSE_S

    def failed(
        self,
        now: float,
        took_s: float,
        *,
        is_probe: bool = False,
        is_write: bool = False,
        hangs: bool = False,
    ) -> None:
        """A call failed; it `hangs` if it has not returned in time, or its connection has ended."""
        self._failures[is_write] += 1
        if is_probe:
            self._is_probing = False
        is_on_trial = self._pause_s > _FIRST_PAUSE_S  # since the breaker was open no read was answered
        is_last = hangs or is_on_trial or sum(self._failures) >= _MOST_FAILURES
        if is_probe or (self.is_closed and is_last):
            self.is_closed = False
            self._failures = [0, 0]
            pause_s = self._pause_s if is_probe else max(self._pause_s, _PAUSE_PER_CALL * took_s)
            self._probe_at = now + min(pause_s, _LONGEST_PAUSE_S)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def takes_probe(self, now: float) -> bool:
        """Whether a probe is due; if so, the caller must make it."""
        if self.is_closed or self._is_probing or now < self._probe_at:
            return False
        self._is_probing = True
        return True
