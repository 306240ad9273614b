"""Where the scheduler's side gets its times from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """The times that the scheduler's side reads.

    Args:
        monotonic: seconds for time-outs.
        unix: seconds since 1970 for people.
        precise: seconds for the stopwatch.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    precise: Callable[[], float] = time.perf_counter
