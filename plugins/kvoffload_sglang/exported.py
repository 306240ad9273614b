"""Adds our metrics to SGLang's own `/metrics`, which sums them over the scheduler processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from kvoffload.telemetry.catalogue import BY_NAME, Kind
from kvoffload.tier_cache import TierCache
from kvoffload_vllm.families import Families

LABELS = ("model_name", "engine", "rank", "pool")
_APART_S = 1.0


class Exported:
    """The counters and gauges of a rank's caches. Histograms are left out.

    Args:
        caches: the caches, each with its values of `LABELS`.
        now: returns monotonic seconds.
    """

    def __init__(
        self, caches: Mapping[Sequence[str], TierCache], now: Callable[[], float] = time.monotonic
    ) -> None:
        classes: dict[type, Callable[..., object]] = {each: each for each in (Counter, Gauge, Histogram)}
        self._caches = [*caches.values()]
        self._families = Families(classes, LABELS, dict(enumerate(caches)))
        self._sent: list[Mapping[str, float]] = [{} for _ in self._caches]
        self._now = now
        self._next_s = 0.0

    def update(self) -> None:
        """Export the changes since the last update, at most once a second."""
        if (now := self._now()) >= self._next_s:
            self._next_s = now + _APART_S
            self._send(lambda series: True)

    def close(self) -> None:
        """Export the remaining changes, and set all gauges to 0."""
        self._send(_is_counter)

    def _send(self, has_value: Callable[[str], bool]) -> None:
        for number, cache in enumerate(self._caches):
            before = self._sent[number]
            after = {series: value for series, value in cache.statistics().items() if has_value(series)}
            self._sent[number] = after
            self._families.observe(_changes(before, after), number)


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the increase of each counter and the value of each gauge, by metric and joined labels.

    Series that are 0 are missing from `before` and `after`.
    """
    changes: dict[str, dict[str, float]] = {}
    for series in {*before, *after}:
        name, _, labels = series.partition(",")
        counted = before.get(series, 0) if _is_counter(series) else 0
        changes.setdefault(name, {})[labels] = after.get(series, 0) - counted
    return changes


def _is_counter(series: str) -> bool:
    return BY_NAME[series.partition(",")[0]].kind is Kind.COUNTER
