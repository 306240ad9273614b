"""For how long lower tiers keep an engine without requests stepping."""

from __future__ import annotations

from collections.abc import Callable

_LATE_STEPS = 4  # in which what ended meanwhile is reported, also where steps are scheduled ahead of reports


class IdleSteps:
    """Bounds the steps that only lower tiers need, from the start of an engine and from the end of its last request.

    Engines do not announce a shutdown: they end their requests, step while anything has work, and stop. So what is spilled
    within this time is all that a shutdown spills, and no shutdown takes longer.

    Args:
        limit_s: `drain_s`.
        now: monotonic seconds.
    """

    def __init__(self, limit_s: float, now: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._now = now
        self._since: float | None = None
        self.late_steps = 0
        """Steps in which copies may be reported that ended while no step could report them."""

    def begin(self) -> None:
        """The last request has ended."""
        self._since = self._now()

    def are_allowed(self) -> bool:
        """Whether the engine may go on stepping for lower tiers alone. Where it may not, copies end unseen."""
        if self._since is None:  # the engine begins to serve
            self._since = self._now()
        if self._now() - self._since < self._limit_s:
            return True
        self.late_steps = _LATE_STEPS
        return False
