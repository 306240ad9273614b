"""Statistics that the scheduler's side sends to vLLM's front end after a step that changed some."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvoffload.telemetry.counters import Source
from kvoffload_vllm import payload


class KVOffloadStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Changes since the last message, all in `data`, in the format of `payload`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={} if data is None else data)

    def reset(self) -> None:
        """Drop everything. The dictionary is replaced, because another object may hold the old one."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVOffloadStats:
        """Add a later message, or another rank's, to this one."""
        if not other.is_empty():
            payload.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values that vLLM's periodic log line shows."""
        return payload.summarize(self.data)

    def is_empty(self) -> bool:
        return payload.is_empty(self.data)


_APART_S = 1.0  # between messages of a busy engine: scrapes are rarer, and a message costs as much as planning several copies


class StatsSender:
    """Makes the messages of one engine. An engine has one, made before anything is counted: messages hold differences.

    Args:
        offload: the runtime's scheduler side.
        now: monotonic seconds.
    """

    def __init__(self, offload: Source, now: Callable[[], float] = time.monotonic) -> None:
        self._changes = payload.Changes(offload, now)
        self.now = now
        self.next_s = float("-inf")
        """When the next message is due, as long as there is a next step that can send it."""

    def take(self) -> KVOffloadStats | None:
        """Return the changes since the last message, None without any. Called on the engine's thread."""
        self.next_s = self.now() + _APART_S
        changes = self._changes.take()
        return KVOffloadStats(changes) if changes is not None else None
