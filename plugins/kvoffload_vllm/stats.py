"""What the scheduler's side tells vLLM's front end after a step, where something has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvoffload.telemetry.changes import Changes, Counted
from kvoffload_vllm import payload


class KVOffloadStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Changes since the last message; everything is in `data`, in the form of `payload`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={} if data is None else data)

    def reset(self) -> None:
        """Forget everything. A new table, as the old one may be another's by now."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVOffloadStats:
        """Add what was sent later, or by another rank."""
        if not other.is_empty():
            payload.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic line of log shows."""
        return payload.summarize(self.data)

    def is_empty(self) -> bool:
        return payload.is_empty(self.data)


_APART_S = (
    1.0  # messages of a busy engine: scrapes are rarer, and each costs as much as planning several copies
)


class StatsSender:
    """Makes the messages of one engine. Make one, before anything is counted: it takes what it tells.

    Args:
        offload: the runtime's scheduler side.
        now: monotonic seconds.
    """

    def __init__(self, offload: Counted, now: Callable[[], float] = time.monotonic) -> None:
        self._changes = Changes(offload, now)
        self.now = now
        self.next_s = float("-inf")
        """When the next message is due, as long as there is a next step that can send it."""

    def take(self) -> KVOffloadStats | None:
        """Return what has changed since the last message, None where nothing has. On the engine's thread."""
        self.next_s = self.now() + _APART_S
        change = self._changes.take()
        return KVOffloadStats(payload.to_payload(change)) if change is not None else None
