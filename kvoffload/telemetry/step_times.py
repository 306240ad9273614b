"""Times of decode-only steps with and without running copies: a measure of how copies slow the engine.

Steps are compared with others that decode about as many tokens, to a power of two. The time from one step to the next counts
only if the step before was of the same kind, because an engine with two steps in flight schedules one while another runs.
Steps that prefill differ too much to be compared; the same slowdown is assumed for them.
"""

from __future__ import annotations

from enum import IntEnum

_SIZES = 24  # powers of two by which a step's decoded tokens are counted
_QUIET_WEIGHT = 1 / 16
_SLOWDOWN_WEIGHT = 1 / 64
_FIRST = 8  # steps of a size, the shortest of which is the first mean: others may have compiled something
_OUTLIER = 4.0  # times the usual, beyond which a step is ignored


class Copies(IntEnum):
    """Which copies run during a step."""

    NONE = 0
    STORES = 1
    LOADS = 2
    BOTH = 3


class StepTimes:
    """Running means; one thread reports steps, in their order."""

    def __init__(self) -> None:
        self._quiet_s = [0.0] * _SIZES
        self._seen = [0] * _SIZES
        self._slowdown = [0.0] * len(Copies)

    def usual_s(self, tokens: int) -> float:
        """Return the time of a step that decodes this many tokens without copies; 0 while unknown."""
        return self._quiet_s[min(max(tokens, 1).bit_length(), _SIZES - 1)]

    def slowdown(self, copies: int) -> float:
        """Return the share by which copies of this kind lengthen a step; 0 while unknown, never negative."""
        return max(self._slowdown[copies], 0.0)

    def observe(self, seconds: float, tokens: int, copies: int) -> None:
        """Note the time of a step that only decoded, at least one token."""
        if seconds <= 0:
            return
        size = tokens.bit_length()
        if size >= _SIZES:
            size = _SIZES - 1
        usual = self._quiet_s[size]
        if copies:
            if usual:
                slower = min(seconds / usual, _OUTLIER) - 1
                self._slowdown[copies] += (slower - self._slowdown[copies]) * _SLOWDOWN_WEIGHT
        elif self._seen[size] < _FIRST:
            self._seen[size] += 1
            self._quiet_s[size] = min(seconds, usual or seconds)
        else:
            within = min(max(seconds, usual / _OUTLIER), usual * _OUTLIER)
            self._quiet_s[size] = usual + (within - usual) * _QUIET_WEIGHT
