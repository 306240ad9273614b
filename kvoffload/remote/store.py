"""The interface of a connection to a remote tier, and `open_store`, which connects to an address."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol, Self

from kvoffload.logs import get_logger
from kvoffload.model.causes import RemoteFault
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import BucketAddress, MooncakeAddress, RemoteAddress
from kvoffload.remote.values import Shard

MISSING = -1
"""In the answer of `get`: the store does not have the value."""
FAILED = -2
"""In the answer of `get`: the store has the value but did not deliver it."""


log = get_logger("remote")


class Refusals:
    """Logs why the remote tier refuses values, but not the same reason twice in a row."""

    def __init__(self) -> None:
        self.fault = RemoteFault.OTHER
        """The kind of the last refusal."""
        self._logged: str | None = None

    def note(self, reason: str | None, fault: RemoteFault = RemoteFault.OTHER) -> None:
        """Record the result of a put: why values were refused, or None if all were accepted."""
        self.fault = self.fault if reason is None else fault
        if reason is not None and reason != self._logged:
            log.warning("remote_write_refused", reason=reason, note="what is in the store is read as before")
        self._logged = reason


class SharedMemory(mmap.mmap):
    """Memory that another process can map. The memory has no name, and is freed when no process maps it any more.

    Attributes:
        descriptor: the file descriptor for mapping it.
        address: the memory's address in this process.
    """

    descriptor: int
    address: int

    def __new__(cls, size: int) -> Self:
        descriptor = os.memfd_create("kvoffload")
        os.ftruncate(descriptor, size)
        self = super().__new__(cls, descriptor, size)
        weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        return self


class RemoteStore(Protocol):
    """One connection to a store. Several threads may use it at once.

    Calls block, some for a minute if the store is dead. If a call fails for one key, only that key's answer reports it.
    If it fails for all keys, it raises `RemoteError`. After `RemoteGone` all further calls fail, and a new connection
    is needed.
    """

    refusals: Refusals

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks the store claims to have. The claim may be wrong."""

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        """Read values into buffers of their size.

        For each value, return the bytes that arrived, `MISSING` or `FAILED`.
        """

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        """Write values; return which of them the store now has. Existing values remain unchanged.

        A store that answers but accepts no values, for example because it is full, has not failed: reads still work.
        """

    def read(self, name: str) -> bytes | None:
        """Return a small object; None if it does not exist."""

    def create(self, name: str, data: bytes) -> None:
        """Write a small object, which the store keeps as long as it can.

        If an object of this name exists, the store may keep that one instead.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object, replacing any object with the same name."""

    def register(self, buffer: memoryview) -> None:
        """Register a whole `SharedMemory` for use by later calls. The memory must outlive the connection."""

    def close(self) -> None:
        """End the connection. No other call may be running."""


def open_store(address: RemoteAddress, timeout_s: float) -> RemoteStore:
    """Connect to a store; may block. Only the client that the address needs is imported.

    Args:
        address: the store's address.
        timeout_s: seconds that a store may take to accept the connection.

    Raises:
        RemoteError: the store does not answer or refuses the connection, or its client is not installed.
    """
    match address:
        case MooncakeAddress():
            from kvoffload.remote.mooncake import MooncakeStore

            return MooncakeStore(address, timeout_s)
        case BucketAddress():
            from kvoffload.remote.bucket import BucketStore

            return BucketStore(address, timeout_s)
