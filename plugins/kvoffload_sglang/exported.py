"""Adds our metrics to SGLang's own `/metrics`, which sums them over the scheduler processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from kvoffload.telemetry.families import Families
from kvoffload.telemetry.payload import Changes
from kvoffload.tier_cache import TierCache

LABELS = ("model_name", "engine", "rank", "pool")


class Exported:
    """The metrics of a rank's caches.

    Args:
        caches: the caches, each with its values of `LABELS`.
        now: returns monotonic seconds.
    """

    def __init__(
        self, caches: Mapping[Sequence[str], TierCache], now: Callable[[], float] = time.monotonic
    ) -> None:
        classes: dict[type, Callable[..., object]] = {each: each for each in (Counter, Gauge, Histogram)}
        self._families = Families(classes, LABELS, dict(enumerate(caches)))
        self._changes = [Changes(cache, now) for cache in caches.values()]

    def update(self) -> None:
        """Export the changes since the last update, at most once a second."""
        for number, changes in enumerate(self._changes):
            if changes.now() >= changes.next_s:
                self._families.observe(changes.take() or {}, number)

    def close(self) -> None:
        """Export the remaining changes. The caches are closed and have no gauges, so their gauges become 0."""
        for changes in self._changes:
            changes.next_s = -math.inf
        self.update()
