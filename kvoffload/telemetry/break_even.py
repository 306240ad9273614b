"""The length of a hit from which loading is faster than computing.

A load of n tokens delays its request by `fixed + n * copy`; computing them takes `n * prefill`. The two are equal at
`fixed / (prefill - copy)` tokens. What is fetched from a lower tier is loaded afterwards, so both delays add up.
"""

from __future__ import annotations

import math
from collections import deque

NEVER_TOKENS = 1_000_000
"""Longer than any prompt: copying is slower than computing at every length."""

_LOADS = (
    31  # of the last loads, the median fixed part: a burst, in which loads wait for each other, is outvoted
)
_COPY_WEIGHT = 1 / 16
_STALE_S = 60.0


class BreakEven:
    """Follows loads, on one thread; any thread may call `weigh` and read `tokens`."""

    def __init__(self) -> None:
        self._fixed_s: deque[float] = deque(maxlen=_LOADS)
        self._copy_s = self._copied_tokens = 0.0
        self._set_at_s = -math.inf
        self.tokens = 0
        """0 while not known, at most `NEVER_TOKENS`. Written whole."""
        self.fixed_s = self.token_s = 0.0
        """Seconds of a load, and of each of its tokens; 0 while not known."""

    def loaded(self, now: float, tokens: int, waited_s: float, copy_s: float) -> None:
        """Add a load that arrived.

        Args:
            now: monotonic seconds.
            tokens: that it brought.
            waited_s: from its allocation until it was reported to the engine.
            copy_s: copy time of a rank.
        """
        if now - self._set_at_s > _STALE_S:
            self._fixed_s.clear()
            self._copy_s = self._copied_tokens = 0.0
        self._set_at_s = now
        self._copy_s += copy_s - self._copy_s * _COPY_WEIGHT
        self._copied_tokens += tokens - self._copied_tokens * _COPY_WEIGHT
        self._fixed_s.append(max(waited_s - copy_s, 0.0))

    def weigh(self, seconds_per_token: float, then: BreakEven | None = None) -> None:
        """Update `tokens`.

        Args:
            seconds_per_token: of prefill; 0 if that is not known.
            then: the loads that follow those measured here, if any do.
        """
        fixed, copied_tokens = sorted(self._fixed_s), self._copied_tokens  # the other thread may clear both
        if not (fixed and copied_tokens and seconds_per_token):
            return
        self.fixed_s = fixed_s = fixed[len(fixed) // 2]
        self.token_s = token_s = self._copy_s / copied_tokens
        if then is not None:
            fixed_s, token_s = fixed_s + then.fixed_s, token_s + then.token_s
        gain = seconds_per_token - token_s
        reached = fixed_s / gain if gain > 0 else NEVER_TOKENS
        self.tokens = min(math.ceil(reached), NEVER_TOKENS)

    @property
    def stale_at(self) -> float:
        """When `least` becomes 0 if nothing more is measured."""
        return self._set_at_s + _STALE_S

    def least(self, now: float) -> int:
        """Return the shortest length that is worth a load now, 0 if it is not known.

        Measurements older than a minute do not count: after a bad minute nothing would be loaded, and so nothing measured,
        ever again.
        """
        return self.tokens if now <= self.stale_at else 0
