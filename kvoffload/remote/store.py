"""The interface of a connection to a remote tier, and `open_store`, which connects to an address."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol, Self

from kvoffload.logs import get_logger
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import BucketAddress, MooncakeAddress, RemoteAddress
from kvoffload.remote.values import Shard

MISSING = -1
"""`get`: the store does not have the value."""
FAILED = -2
"""`get`: the store did not deliver the value."""


log = get_logger("remote")


class Refusals:
    """Logs why the remote tier refuses values, once for each reason."""

    def __init__(self) -> None:
        self._logged: str | None = None

    def note(self, reason: str | None) -> None:
        """Note a put's answer: None if the value was accepted."""
        if reason is not None and reason != self._logged:
            log.warning("remote_write_refused", reason=reason, note="what is in the store is read as before")
        self._logged = reason


class SharedMemory(mmap.mmap):
    """Memory that another process can map; it has no name, and ends with the last process that has it.

    Attributes:
        descriptor: by which it is mapped.
        address: where it lies in this process.
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
    """One connection to a store. Calls block, some for a minute if the store is dead; several threads may call at once.

    A failure of one key is the answer for that key. A call that fails for all keys raises `RemoteError`. After `RemoteGone` all further
    calls fail, and a new connection is needed.
    """

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks the store claims to have. It may be wrong."""

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        """Read values into buffers of the values' size; return for each the bytes that arrived, or `MISSING` or `FAILED`."""

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        """Write values; return which of them the store has now. Values that it had already stay as they are.

        A store that answers but accepts nothing, because it is full for instance, has not failed: it can still be read.
        """

    def read(self, name: str) -> bytes | None:
        """Return a small object, None if there is none."""

    def create(self, name: str, data: bytes) -> None:
        """Write a small object that the store keeps as long as it can. An existing object of this name may be kept instead."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object, replacing one of the same name."""

    def register(self, buffer: memoryview) -> None:
        """Register memory that later calls read and write: all of a `SharedMemory`. It must outlive the connection."""

    def close(self) -> None:
        """End the connection. No other call may be running."""


def open_store(address: RemoteAddress, timeout_s: float) -> RemoteStore:
    """Connect to a store. Blocks. The store's client is imported only then.

    Args:
        address: of it.
        timeout_s: seconds that a store may take to accept the connection.

    Raises:
        RemoteError: it does not answer, refuses, or its client is not installed.
    """
    match address:
        case MooncakeAddress():
            from kvoffload.remote.mooncake import MooncakeStore

            return MooncakeStore(address, timeout_s)
        case BucketAddress():
            from kvoffload.remote.bucket import BucketStore

            return BucketStore(address, timeout_s)
