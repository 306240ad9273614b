"""Intervals that assume nothing about how samples are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return two of the samples between which the median lies with at least this confidence.

    The number of samples below the median is that of heads in as many tosses of a coin, so of n ordered samples the
    k-th from either end enclose it unless fewer than k tosses came up heads, or fewer than k tails. The narrowest such
    pair is taken; where even the outermost is not enough (fewer than 6 samples for 95 %), everything is possible.
    """
    ordered = sorted(samples)
    count = len(ordered)
    allowed = (1 - confidence) / 2
    rank, tail = 0, 0.0
    while rank < count // 2 and (tail := tail + comb(count, rank) / 2**count) <= allowed:
        rank += 1
    if rank == 0:
        return float("-inf"), float("inf")
    return ordered[rank - 1], ordered[-rank]
