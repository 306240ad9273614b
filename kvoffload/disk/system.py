"""What the standard library does not wrap: aligned memory."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

PAGE = 4096
"""Direct I/O needs addresses, offsets and lengths that are multiples of a device's sector. No sector is larger than this."""

_HUGE_PAGE, _LARGE = 2**21, 2**20


def round_up(size: int) -> int:
    """Return the next multiple of `PAGE`."""
    return -(-size // PAGE) * PAGE


def aligned_buffer(size: int) -> memoryview:
    """Return `size` bytes, rounded up to `PAGE`, of zeroed memory at an address that direct I/O takes.

    A buffer of `_LARGE` bytes or more has huge pages, if the kernel has any. From pages of 4 KiB, a transfer of 1 MiB has 256 parts;
    on a virtual NVMe disk it took twice as long and four times the processor time.
    """
    size = max(round_up(size), PAGE)
    room = size if size < _LARGE else -(-size // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size < _LARGE:
        return memoryview(memory)
    with suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    return memoryview(memory)[start : start + size]
