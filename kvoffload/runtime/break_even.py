"""The break-even length: how many tokens a hit must have so that loading it delays requests less than computing it.

A load of n tokens delays its request by `queued + fixed + n * copy`, in which `queued` is the time that the open loads
still take. It leaves the engine free for others. Computing the tokens takes `n * prefill`, and delays each request that
waits for the engine as well, and those that arrive before the engine has caught up. With d delayed requests, both are
equal at

    (queued + fixed) / (d * prefill - copy)    tokens

So requests that wait make shorter hits worth a load, and open loads make only longer hits worth one. Blocks fetched
from a lower tier must still be loaded, so both delays add up.
"""

from __future__ import annotations

import math
from collections import deque

NEVER_TOKENS = 1_000_000
"""A length longer than any prompt, used when copying is slower than computing at every length."""

# How many recent loads to keep: enough that a burst of loads that delay each other hardly shifts the quartile.
_LOADS = 31
_STALE_S = 60.0

_SHARE_S = 10.0  # a share of the time is a mean over about so many seconds
_LARGEST_SHARE = 0.9  # 1 would stand for an engine that never catches up


class BusyShare:
    """The share of the time that the engine prefills."""

    def __init__(self) -> None:
        self.tokens = 0
        """How many tokens were prefilled since the last update."""
        self._share = 0.0
        self._updated_s = -math.inf

    def update(self, now: float, token_s: float) -> None:
        """Add the tokens since the last update, each of which took `token_s` seconds."""
        elapsed_s = now - self._updated_s
        self._updated_s = now
        if elapsed_s > 0:
            share = min(self.tokens * token_s / elapsed_s, _LARGEST_SHARE)
            self._share += (share - self._share) * min(elapsed_s / _SHARE_S, 1)
            self.tokens = 0

    @property
    def delayed(self) -> float:
        """Return how many requests a request's work delays on average, counting itself, besides those that wait.

        Work delays all requests that arrive until the queue is empty. In a queue that is busy for this share of the
        time, that adds up to the known factor 1 / (1 - share).
        """
        return 1 / (1 - self._share)


class BreakEven:
    """The break-even length of a tier, from recent loads or fetches.

    One thread adds loads; any thread may call `weigh` and `tokens`.
    """

    def __init__(self) -> None:
        # For each load: its fixed seconds, its copy seconds and its tokens.
        self._loads: deque[tuple[float, float, int]] = deque(maxlen=_LOADS)
        self._stale_at = -math.inf
        self._is_trial = False  # whether the next load that ends replaces the measurements
        self._free_at = -math.inf  # when the open loads will have ended
        self.fixed_s = self.token_s = 0.0
        """Fixed seconds of a load, and further seconds for each token; 0 while unknown."""

    def scheduled(self, now: float, tokens: int) -> float:
        """Add a load or fetch that begins. Return the seconds that the open loads before it still take."""
        free_at = self._free_at
        queued_s = free_at - now if free_at > now else 0.0
        self._free_at = now + queued_s + tokens * self.token_s
        if now > self._stale_at and self._loads:
            self._stale_at = now + _STALE_S
            self._is_trial = True
        return queued_s

    def ended(self, now: float, open_tokens: int) -> None:
        """Note that a load has ended, after which loads of `open_tokens` tokens are open."""
        self._free_at = now + open_tokens * self.token_s

    def loaded(self, now: float, tokens: int, waited_s: float, copy_s: float) -> None:
        """Add a load or fetch that succeeded.

        Args:
            now: the time, in monotonic seconds.
            tokens: how many tokens were copied in these seconds, at least one.
            waited_s: seconds from the copy's scheduling to the report of its end, without those for earlier copies.
            copy_s: seconds that one rank spent copying.
        """
        if now > self._stale_at or self._is_trial:
            self._loads.clear()
            self._is_trial = False
        self._stale_at = now + _STALE_S
        self._loads.append((max(waited_s - copy_s, 0.0), copy_s, tokens))

    def weigh(self) -> None:
        """Compute `fixed_s` and `token_s` from the measurements.

        The fixed time is the lower quartile, because the report of a load waits for the engine's step, which takes
        long only if the engine prefills.
        """
        loads = sorted(self._loads)  # a copy, because another thread may add loads
        if loads:
            self.fixed_s = loads[len(loads) // 4][0]
            self.token_s = sum([load[1] for load in loads]) / sum([load[2] for load in loads])

    def queued_s(self, now: float) -> float:
        """Return the seconds that the open loads still take."""
        return max(self._free_at - now, 0.0)

    def tokens(self, now: float, computing_s: float, then: BreakEven | None = None) -> int:
        """Return the break-even length, at most `NEVER_TOKENS`; 0 while unknown.

        Args:
            now: the time, in monotonic seconds.
            computing_s: the seconds by which computing a token delays requests, all together; 0 if unknown.
            then: for fetches, the measurements of loads, because a load follows each fetch.
        """
        if not (computing_s and self._loads):
            return 0
        fixed_s, token_s = self.queued_s(now) + self.fixed_s, self.token_s
        if then is not None:
            fixed_s += then.queued_s(now) + then.fixed_s
            token_s += then.token_s
        return _length(fixed_s, computing_s - token_s)

    def usual_tokens(self, computing_s: float) -> int:
        """Return the break-even length without open loads; 0 while unknown."""
        return _length(self.fixed_s, computing_s - self.token_s) if computing_s and self._loads else 0

    def least(self, now: float, computing_s: float, then: BreakEven | None = None) -> int:
        """Return the fewest tokens worth loading now; 0 if unknown. The arguments are those of `tokens`.

        Measurements expire after a minute without loads, and count again while the next load is open. Otherwise slow
        loads could stop all loads, and the length would never be measured again.
        """
        return self.tokens(now, computing_s, then) if now <= self._stale_at else 0


def _length(fixed_s: float, gain_s: float) -> int:
    return min(math.ceil(fixed_s / gain_s), NEVER_TOKENS) if gain_s > 0 else NEVER_TOKENS
