"""Memory has huge pages, and is not marked for khugepaged, which would hold up every copy of the process."""

from __future__ import annotations

import ctypes
import mmap
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffload.disk.system import aligned_buffer
from kvoffload.transfer.host_memory import MmapAllocator

SIZE = 8 * 2**20
COLLAPSE = 25  # MADV_COLLAPSE of the kernel's headers


def address_of(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def kernel_has_huge_pages() -> bool:
    probe = mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(address_of(probe), 0, len(probe))
    try:
        probe.madvise(COLLAPSE)
    except OSError:
        return False
    return True


def check(address: int) -> None:
    maps = Path("/proc/self/smaps").read_text()
    mappings = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages: +(\d+) kB.*?^VmFlags:(.*?)$", maps, re.M | re.S
    )
    ((huge, flags),) = (
        (int(huge), flags.split())
        for first, end, huge, flags in mappings
        if int(first, 16) <= address < int(end, 16)
    )
    assert (huge > 0) == kernel_has_huge_pages()
    assert "hg" not in flags  # what MADV_HUGEPAGE sets


def test_a_large_buffer_has_huge_pages_without_khugepaged() -> None:
    buffer = aligned_buffer(SIZE)
    check(address_of(buffer))


@pytest.mark.asyncio
async def test_host_memory_has_huge_pages_without_khugepaged() -> None:
    with ThreadPoolExecutor(1) as threads:
        chunk = await MmapAllocator(threads).allocate(SIZE)
        check(chunk.address)
        chunk.release()
