"""What observers can read about the current hook, beyond its messages."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

_STEPS = 64  # several times as many as there are between two ticks of the bus

HasToken = Callable[[], object]
"""Returns a true value once the request has its first token."""


class CurrentHook:
    """The current hook's time, which code inside the hook reads instead of a clock, and what the hook adds to its fact.

    Args:
        monotonic: returns the monotonic time in seconds.
        unix: returns the seconds since 1970.

    Attributes:
        now: when the current or last hook began, in monotonic seconds. Each hook sets it at its start.
        spent: for each hook, the seconds that its calls have taken since the last step's batch.
        steps: `spent` of the steps that are not counted yet, the oldest first. If nothing counts them, the oldest are dropped.
        has_token: for a new request, whether it has its first token; None if that is not measured.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._unix = unix
        self.now = monotonic()
        self.spent = defaultdict[Any, float](float)
        self.steps = deque[dict[Any, float]](maxlen=_STEPS)
        self.has_token: HasToken | None = None

    def unix(self, at: float) -> float:
        """Convert a monotonic time to seconds since 1970."""
        return self._unix() - (self._monotonic() - at)
