"""The clock that everything but tests uses."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """The machine's time."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
