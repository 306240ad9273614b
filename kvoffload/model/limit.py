"""A limit on copies in flight that adapts to the conflicts of these copies with other work."""

from __future__ import annotations

from math import inf

# A copy is slow if it takes more than this many times as long as the fastest. Undisturbed copies vary less.
_SLOW = 2.0
# The best speed decays by this factor with each copy, so that one fast outlier does not count forever.
_FORGET = 0.98


class AdaptiveLimit:
    """The limit on stores between device and host, or on spills to a tier.

    No request waits for these copies, but they take bandwidth from loads on the same bus or tier, and from the forward
    pass on the same memory. Two observations show such a conflict:

    * a load was pending when a copy ended, so the load and the copy ran at the same time;
    * a copy took twice as long as the fastest of its kind, so other work, perhaps of another process, uses the link.

    Either observation halves the limit. Copies that began before the halving cannot halve the limit again. A copy that
    ends undisturbed raises the limit by one step. So an occasional load costs little, and during continuous loads a few
    copies still run.

        most   ────╮          ╭──────        while the limit is low, a queued store starts only after the previous one
                   ╰─╮     ╭──╯              has ended, so the link is free in between
        least        ╰─────╯

    Callers must serialize calls; any thread may read `value`.

    Args:
        most: the highest and the initial value of the limit.
        least: the lowest value of the limit.
        step: how much an undisturbed copy adds to the limit.
    """

    def __init__(self, most: float, least: float, step: float) -> None:
        self.value = most
        self._most = most
        self._least = least
        self._step = step
        self._cut_at = -inf
        self._best: dict[
            int, float
        ] = {}  # the highest speed of each kind of copy, in the unit of `size` per second

    @property
    def share(self) -> float:
        """Return the current limit divided by the highest limit."""
        return self.value / self._most

    def ended(
        self,
        size: float,
        seconds: float,
        kind: int,
        *,
        began: float,
        now: float,
        beside_load: bool,
        noise_s: float = 0.0,
    ) -> None:
        """Adapt the limit to a copy that succeeded.

        Args:
            size: how much was copied, in the same unit at each call.
            seconds: the copy's duration; 0 if unknown.
            kind: a number; copies with different numbers are not compared.
            began: when the copy began, by any clock that never goes back.
            now: when the copy's end was noticed, by the same clock.
            beside_load: True if a load was pending when the copy ended.
            noise_s: how many of the `seconds` may not have been spent copying.
        """
        if not self._is_slow(size, seconds, kind, noise_s) and not beside_load:
            self.value = min(self.value + self._step, self._most)
        elif began >= self._cut_at:
            self.value = max(self.value / 2, self._least)
            self._cut_at = now

    def _is_slow(self, size: float, seconds: float, kind: int, noise_s: float) -> bool:
        if seconds <= 0:
            return False
        speed = size / seconds
        best = max(speed, _FORGET * self._best.get(kind, 0.0))
        self._best[kind] = best
        return speed * _SLOW < best and seconds - size / best > noise_s
