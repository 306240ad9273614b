"""The interface of a connection to a remote tier, and a function that opens the connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import BucketAddress, MooncakeAddress, RemoteAddress
from kvoffload.remote.client import Refusals, log
from kvoffload.remote.values import Shard


class RemoteStore(Protocol):
    """A connection to a remote tier. Several threads may use it at once.

    Calls block, some of them for a minute if the remote tier is dead. If a call fails for one key, the result for
    this key says so. If a call fails for all keys, it raises `RemoteError`. After `RemoteGone`, all further calls
    fail, and a new connection is needed.
    """

    refusals: Refusals

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        """Return for each block whether the remote tier claims to have it. The claim may be wrong."""

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        """Read each value into the buffer at the same position, which must have the value's size.

        For each value, return the number of bytes that were read, or `MISSING`, or `FAILED`.
        """

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        """Write values. Return for each value whether the remote tier has accepted it. Existing values remain unchanged.

        A full remote tier may evict an accepted value at once.
        A remote tier that answers but accepts no values, for example because it is full, has not failed: reads still
        work.
        """

    def read(self, name: str) -> bytes | None:
        """Return a small object; None if it does not exist."""

    def create(self, name: str, data: bytes) -> None:
        """Write a small object. The remote tier avoids evicting the object.

        If an object of this name already exists, the remote tier may keep the existing object instead.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object. It replaces any object of the same name."""

    def register(self, buffer: memoryview) -> None:
        """Register a whole `SharedMemory` for use by later calls. The memory must exist until `close`."""

    def close(self) -> None:
        """End the connection. Call this only while no other call is running."""


def open_store(address: RemoteAddress, timeout_s: float) -> RemoteStore:
    """Connect to a remote tier, and return the connection. This may block.

    Args:
        address: the remote tier's address.
        timeout_s: how many seconds the remote tier may take to accept the connection.

    Raises:
        RemoteError: the remote tier does not answer, refuses the connection or cannot do what an engine needs, or its
            client is not installed.
    """
    match address:
        case MooncakeAddress():
            from kvoffload.remote.mooncake import MooncakeStore

            return MooncakeStore(address, timeout_s)
        case BucketAddress():
            from kvoffload.remote.bucket import BucketStore

            store = BucketStore(address, timeout_s)
            for lack in store.first_look():
                log.warning("remote_server_lacks", note=lack)
            return store
