"""What steps that only decode take, with copies under way and without: the measure of how copies slow the engine.

Compared are steps that decode alike many tokens, to a power of two. The time from one step to the next counts only when
the step before was of the same kind, since an engine with two steps in flight schedules one while another runs. Steps
that prefill are too different to compare; they are taken to be slowed by the same share.
"""

from __future__ import annotations

from enum import IntEnum

_SIZES = 24  # powers of two by which a step's decoded tokens are counted
_QUIET_WEIGHT = 1 / 16
_SLOWDOWN_WEIGHT = 1 / 64
_FIRST = 8  # steps of a size, the shortest of which is the first mean: others may have compiled something
_OUTLIER = 4.0  # times the usual, beyond which a step says nothing more


class Copies(IntEnum):
    """Which copies are under way during a step."""

    NONE = 0
    STORES = 1
    LOADS = 2
    BOTH = 3


class StepTimes:
    """Running means; one thread tells, in the order of steps."""

    def __init__(self) -> None:
        self._quiet_s = [0.0] * _SIZES
        self._seen = [0] * _SIZES
        self._slowdown = [0.0] * len(Copies)

    def usual_s(self, tokens: int) -> float:
        """Return what a step takes that decodes so many tokens and no copy disturbs; 0 while unknown."""
        return self._quiet_s[min(max(tokens, 1).bit_length(), _SIZES - 1)]

    def slowdown(self, copies: int) -> float:
        """Return by which share copies of this kind lengthen a step; 0 while unknown, and never below."""
        return max(self._slowdown[copies], 0.0)

    def observe(self, seconds: float, tokens: int, copies: int) -> None:
        """A step took so long that decoded so many tokens, at least 1, and only that."""
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
