"""Names the last reset of the engines of one kind, in a file that all of them see.

A reset discards blocks that other engines may have copied, and engines that start later must find none of these copies.
So a reset first changes the name of the last reset. A table counts only while this name is the one under which it was
begun: engines that run do not read each other's memory after a reset, and engines that start later read only tables
that were begun after it. A name is random, so two resets at once cannot make an older name valid again.
"""

from __future__ import annotations

import os
import secrets

from kvoffload.disk.open_folder import OpenFolder

NO_RESET = bytes(8)
"""The name before the first reset."""
_NAME = "reset"


def last_reset(kind: OpenFolder) -> bytes:
    """Return the name of the last reset of an engine of this kind.

    Raises:
        DiskError, OSError: the file cannot be read.
    """
    try:
        descriptor = kind.open(_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return NO_RESET
    try:
        return os.pread(descriptor, len(NO_RESET), 0).ljust(len(NO_RESET), b"\0")
    finally:
        os.close(descriptor)


def open_resets(kind: OpenFolder) -> int:
    """Return a descriptor for `note_reset`. The file gets its memory here, so that a reset needs none.

    Raises:
        DiskError, OSError: the file cannot be used.
    """
    descriptor = kind.open(_NAME, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, len(NO_RESET))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def note_reset(descriptor: int) -> None:
    """Record a reset: no table that was begun before it counts any more."""
    os.pwrite(descriptor, secrets.token_bytes(len(NO_RESET)), 0)
