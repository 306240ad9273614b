"""Adds kvoffload's metrics to SGLang's own `/metrics`, where SGLang adds up the values of its scheduler processes."""

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
    """Exports the metrics of one rank's tier caches.

    Args:
        caches: the tier caches. Each key has the values of the labels in `LABELS`.
        now: returns the monotonic clock's time in seconds.
    """

    def __init__(
        self, caches: Mapping[Sequence[str], TierCache], now: Callable[[], float] = time.monotonic
    ) -> None:
        classes: dict[type, Callable[..., object]] = {each: each for each in (Counter, Gauge, Histogram)}
        self._families = Families(classes, LABELS, dict(enumerate(caches)))
        self._changes = [Changes(cache, now) for cache in caches.values()]

    def update(self) -> None:
        """Export the changes since the last export. Do nothing if the last export was less than a second ago."""
        for number, changes in enumerate(self._changes):
            if changes.now() >= changes.next_s:
                self._families.observe(changes.take() or {}, number)

    def close(self) -> None:
        """Export the last changes. Call this method after the caches have closed; then all gauges become 0."""
        for changes in self._changes:
            changes.next_s = -math.inf
        self.update()
