"""A limit on copies in flight that adapts to how much these copies disturb other work."""

from __future__ import annotations

from math import inf

# A copy is slow if it takes more than this many times as long as the best one; undisturbed copies vary less.
_SLOW = 2.0
# The best speed decays by this factor with each copy, so that one fast outlier does not count forever.
_FORGET = 0.98


class AdaptiveLimit:
    """The limit on stores between device and host, or on spills to a tier.

    No request waits for these copies, but they take bandwidth from loads on the same bus or tier, and from the forward
    pass on the same memory. Two observations show such a conflict:

    * a load was pending when a copy ended, so the load and the copy ran at the same time;
    * a copy took twice as long as the best of its kind, so other work uses the same link, perhaps in another process.

    Either observation halves the limit. Copies that began before the halving cannot halve the limit again. A copy that
    ends undisturbed raises the limit by one step. So an occasional load hardly matters, and during continuous loads a
    few copies still run.

        most   ────╮          ╭──────        while the limit is low, a queued store starts only after the previous one
                   ╰─╮     ╭──╯              has ended, so the link is free in between
        least        ╰─────╯

    Callers must serialize calls; any thread may read `value`.

    Args:
        most: the highest value, which is also the initial one.
        least: the lowest value.
        step: how much an undisturbed copy adds.
    """

    def __init__(self, most: float, least: float, step: float) -> None:
        self.value = most
        self._most = most
        self._least = least
        self._step = step
        self._cut_at = -inf
        self._best: dict[int, float] = {}  # the best speed of each kind of copy, in size per second

    @property
    def share(self) -> float:
        """Return the current limit as a share of the highest limit."""
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
            size: how much was copied, in any unit.
            seconds: how long the copy took; 0 if that is unknown.
            kind: only copies of the same kind are compared with each other.
            began: when the copy began, by any clock.
            now: when its end was noticed, by the same clock.
            beside_load: whether a load was pending when the copy ended.
            noise_s: time other than copying that `seconds` may include.
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
