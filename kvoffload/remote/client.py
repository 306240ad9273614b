"""What the clients of remote tiers share: results of reads, refused values, and memory that another process can map."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Self

from kvoffload.logs import get_logger
from kvoffload.model.causes import RemoteFault

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
