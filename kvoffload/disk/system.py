"""Allocates memory that is aligned for direct I/O."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

PAGE = 4096
"""A multiple of every device's sector size. Direct I/O needs addresses, offsets and lengths that are such multiples."""

_HUGE_PAGE, _LARGE = 2**21, 2**20


def round_up(size: int) -> int:
    """Return the size rounded up to a multiple of `PAGE`."""
    return -(-size // PAGE) * PAGE


def aligned_buffer(size: int) -> memoryview:
    """Return zeroed memory that is aligned for direct I/O. `size` is rounded up to a multiple of `PAGE`.

    A buffer of `_LARGE` bytes or more gets huge pages, if the kernel supports them. With pages of 4 KiB, the device
    must transfer 1 MiB in 256 parts. On a virtual NVMe disk, that took twice as long and four times the CPU time.
    """
    size = max(round_up(size), PAGE)
    room = size if size < _LARGE else -(-size // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size < _LARGE:
        return memoryview(memory)
    with suppress(OSError):  # not every kernel supports huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    return memoryview(memory)[start : start + size]
