"""The port behind which a remote store is reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvoffload.logs import get_logger
from kvoffload.model.ids import BlockKey
from kvoffload.remote.values import Shard

MISSING = -1
"""`get`: the store does not have the value."""
FAILED = -2
"""`get`: the store did not deliver the value."""


log = get_logger("remote")


class Refusals:
    """Logs why a store takes no values, once for each reason."""

    def __init__(self) -> None:
        self._logged: str | None = None

    def note(self, reason: str | None) -> None:
        """A put was answered: with None it was taken."""
        if reason is not None and reason != self._logged:
            log.warning("remote_write_refused", reason=reason, note="what is in the store is read as before")
        self._logged = reason


class RemoteStore(Protocol):
    """One connection to a store. Calls block, some for a minute where the store is dead; threads may call at the same time.

    What a call cannot do for one key is its answer for that key. A call that fails as a whole raises `RemoteError`.
    """

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks the store says it has: a hint."""

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        """Read values into buffers of the values' size; return for each the bytes that arrived, or `MISSING` or `FAILED`."""

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        """Write values; return which of them the store has now. What it had before stays as it is.

        A store that answers and takes none, as one that is full, has not failed: what it has can be read.
        """

    def read(self, name: str) -> bytes | None:
        """Return a small object, None if there is none."""

    def create(self, name: str, data: bytes) -> None:
        """Write a small object that the store keeps as long as it can; if there is one of this name, it may stay."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object in the place of the one that may be there."""

    def register(self, buffer: memoryview) -> None:
        """Make memory known that later calls read and write. It must outlive the connection."""

    def close(self) -> None:
        """End the connection. No other call may be running."""
