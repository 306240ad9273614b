"""The engine's time to compute a prompt's tokens, estimated from the times and contents of its steps.

The end of a step is not reported, and an engine may schedule the next step before it. So a run is timed: consecutive steps
that prefill, and the one step after them:

    steps       D   P   P   D   D          D decodes only, P prefills
    counted         |-----------|          from the run's first step to the second step behind it
    subtracted      d   d   d              for each, the time of a step that only decodes as many tokens

With one step in flight the three intervals are the durations of P, P and D; with two in flight, of D, P and P. Either
way the rest is the time that prefilling adds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_RUNS = 33  # of the last runs, the median by tokens: a stall, as of a first compilation, is outvoted
_LONGEST_RUN = 32  # steps after which a run is a sample even if it continues
_LEAST_SHARE = (
    0.1  # of a run's time that counts as prefilling, however long its steps would have taken without
)


class PrefillRate:
    """Seconds that prefilling adds per token.

    Args:
        least_tokens: shorter runs mostly measure a step's fixed cost; they count only while there is no other run.
    """

    def __init__(self, least_tokens: int) -> None:
        self._least_tokens = least_tokens
        self._runs: deque[tuple[float, int]] = deque(maxlen=_RUNS)
        self._is_provisional = True
        self._began = 0.0
        self._tokens = self._steps = 0
        self._usual_s = 0.0
        self._is_over = False
        self.is_timing = False
        """Whether a run is open, so that steps without prefill must be reported too."""
        self._rate: float | None = 0.0  # None: to be computed again

    @property
    def seconds_per_token(self) -> float:
        """Seconds that prefilling adds per token; 0 until something was measured. Any thread may ask.

        Computed when it is read, because a median takes too long for a hook.
        """
        rate = self._rate
        if rate is None:
            rate = self._rate = _median(tuple(self._runs))
        return rate

    def step(self, now: float, tokens: int, usual_s: float) -> None:
        """A step was scheduled.

        Args:
            now: monotonic seconds.
            tokens: that it prefills.
            usual_s: what a step takes that only decodes what this one decodes; 0 for one with nothing to compute.
        """
        if self.is_timing and (self._is_over or self._steps == _LONGEST_RUN):
            self._end(now)
        if not tokens:
            self._is_over = True
            self._usual_s += usual_s
            return
        if not self.is_timing:
            self.is_timing, self._began = True, now
            self._tokens = self._steps = 0
            self._usual_s, self._is_over = 0.0, False
        self._tokens += tokens
        self._steps += 1
        self._usual_s += usual_s

    def idle(self, now: float) -> None:
        """The engine has nothing left to compute."""
        if self.is_timing:
            self._end(now)

    def _end(self, now: float) -> None:
        took, self.is_timing = now - self._began, False
        is_long = self._tokens >= self._least_tokens
        if took <= 0 or not (is_long or self._is_provisional):
            return
        if is_long and self._is_provisional:
            self._runs.clear()
            self._is_provisional = False
        seconds = max(took - self._usual_s, _LEAST_SHARE * took)
        self._runs.append((seconds / self._tokens, self._tokens))
        self._rate = None


def _median(runs: Sequence[tuple[float, int]]) -> float:
    """Return the median of the first numbers, each counted as often as the second says; 0 of none."""
    half = sum([tokens for _, tokens in runs]) / 2
    reached = 0
    for seconds, tokens in sorted(runs):
        reached += tokens
        if reached >= half:
            return seconds
    return 0.0
