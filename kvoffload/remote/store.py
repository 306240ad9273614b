"""The interface of a connection to a remote tier, and a function that opens the connection."""

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
"""`get` returns this for a value that the remote tier does not have."""
FAILED = -2
"""`get` returns this for a value that the remote tier has but did not deliver."""


log = get_logger("remote")


class Refusals:
    """Logs why the remote tier refuses values. The same reason is not logged twice in a row."""

    def __init__(self) -> None:
        self.fault = RemoteFault.OTHER
        """The kind of the last refusal."""
        self._logged: str | None = None

    def note(self, reason: str | None, fault: RemoteFault = RemoteFault.OTHER) -> None:
        """Record a put. `reason` says why the remote tier refused values; None if it accepted all of them."""
        self.fault = self.fault if reason is None else fault
        if reason is not None and reason != self._logged:
            log.warning(
                "remote_write_refused", reason=reason, note="values in the remote tier are still read"
            )
        self._logged = reason


class SharedMemory(mmap.mmap):
    """Memory that another process can map. It has no name, and is freed when no process maps it any more.

    Attributes:
        descriptor: the file descriptor with which the memory can be mapped.
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
