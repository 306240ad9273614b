"""From which length on loading beats computing.

A load of n tokens keeps its request waiting for a fixed part and for the copy: `fixed + n * copy`. Computing them takes
`n * prefill`. The two are equal at `fixed / (prefill - copy)` tokens.
"""

from __future__ import annotations

import math
from collections import deque

NEVER_TOKENS = 1_000_000
"""Stands for a length that no prompt has: copying is slower than computing, whatever the length."""

_LOADS = (
    31  # of the last loads, the median fixed part: a burst, in which loads wait for each other, is outvoted
)
_COPY_WEIGHT = 1 / 16
_STALE_S = 60.0


class BreakEven:
    """Follows loads. One thread tells; `tokens` may be read by any."""

    def __init__(self) -> None:
        self._fixed_s: deque[float] = deque(maxlen=_LOADS)
        self._copy_s = self._copied_tokens = 0.0
        self._set_at_s = -math.inf
        self.tokens = 0
        """0 while unknown, at most `NEVER_TOKENS`. Written whole."""

    def loaded(self, now: float, tokens: int, waited_s: float, copy_s: float) -> None:
        """A load arrived.

        Args:
            now: monotonic seconds.
            tokens: that it brought.
            waited_s: from when it became binding until the engine was told.
            copy_s: in which a rank copied.
        """
        if now - self._set_at_s > _STALE_S:
            self._fixed_s.clear()
            self._copy_s = self._copied_tokens = 0.0
        self._set_at_s = now
        self._copy_s += copy_s - self._copy_s * _COPY_WEIGHT
        self._copied_tokens += tokens - self._copied_tokens * _COPY_WEIGHT
        self._fixed_s.append(max(waited_s - copy_s, 0.0))

    def weigh(self, seconds_per_token: float) -> None:
        """Compute `tokens` anew against what prefilling takes; 0 where that is unknown."""
        if not self._fixed_s or not seconds_per_token:
            return
        gain = seconds_per_token - self._copy_s / self._copied_tokens
        fixed = sorted(self._fixed_s)[len(self._fixed_s) // 2]
        reached = fixed / gain if gain > 0 else NEVER_TOKENS
        self.tokens = min(math.ceil(reached), NEVER_TOKENS)

    def least(self, now: float) -> int:
        """Return the least length that is worth a load now, 0 where nothing says so.

        What was measured more than a minute ago says nothing: else a bad minute, after which nothing is loaded any
        more, would never be corrected.
        """
        return self.tokens if now - self._set_at_s <= _STALE_S else 0
