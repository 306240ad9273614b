"""Where the scheduler's side gets its times from, and how it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """The times that the scheduler's side reads, and what its coroutines sleep on.

    Args:
        monotonic: seconds for time-outs.
        unix: seconds since 1970 for people.
        precise: seconds for the stopwatch.
        sleep: waits for seconds.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    precise: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
