"""A median and how far it can be trusted, as benches tell it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from kvoffload.cli.demo.intervals import median_interval


@dataclass(frozen=True, slots=True)
class Spread:
    """Some samples in three numbers.

    Args:
        median: of the samples.
        low, high: the median's 95 % interval; None with too few samples for one.
    """

    median: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Sum up at least one sample."""
        low, high = median_interval(samples)
        is_known = math.isfinite(low)
        return cls(statistics.median(samples), low if is_known else None, high if is_known else None)

    def to_plain(self) -> dict[str, float | None]:
        """The three numbers to five digits, for JSON."""
        return {
            name: None if value is None else float(f"{value:.5g}") for name, value in asdict(self).items()
        }

    def text(self, form: str = "{:.2f}", unit: str = "") -> str:
        """Return it as a table shows it."""
        shown = f"{form.format(self.median)}{unit}"
        if self.low is None or self.high is None:
            return shown
        return f"{shown} [{form.format(self.low)}, {form.format(self.high)}]"
