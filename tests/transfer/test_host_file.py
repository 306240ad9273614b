"""One rank's host memory in a file: where its bytes are if the next process has another number of slots."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from kvoffload.disk.identity import KVIdentity
from kvoffload.node.folder import HostPlace
from kvoffload.testing import FakeDevice
from kvoffload.transfer.host_file import HostFile, RankShape, open_host_file

LAYOUT = FakeDevice(4, [4096, 1024]).layout
SHAPE = RankShape(0, LAYOUT, 16)


@pytest.fixture(params=["tmpfs", "hugetlbfs"])
def pages(request: pytest.FixtureRequest) -> Path | None:
    """Return the folder that has the memory itself; None if `host_path` has it."""
    return request.getfixturevalue("huge_pages") if request.param == "hugetlbfs" else None


def opened(root: Path, engine: str, slots: int, pages: Path | None = None) -> HostFile:
    place = HostPlace(root, "kind", engine, lambda: KVIdentity("", "", "", {}), pages)
    return open_host_file(place.claim(), RankShape(0, LAYOUT, 16, page=place.page), slots, pages)


class Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def page_at(address: int, size: int) -> int:
    """Return a pipe that refers to the pages at an address, as a device does that has pinned them."""
    source, target = os.pipe()
    assert ctypes.CDLL(None).vmsplice(target, ctypes.byref(Piece(address, size)), 1, 0) == size
    os.close(target)
    return source


@pytest.mark.parametrize(("before", "after"), [(10, 12), (12, 10), (40, 12), (12, 40)])
def test_r20_pages_that_an_old_device_has_pinned_are_not_those_of_other_slots(
    shared_memory: Path, pages: Path | None, before: int, after: int
) -> None:
    old = opened(shared_memory, "old", before, pages)
    old.begin()
    size = SHAPE.chunk_bytes(min(before, 16))
    address = old.take(0, size)
    ctypes.memset(address, ord("a"), size)
    pinned = page_at(address + 4096, 4096)
    old.close(may_still_write=False)
    new = opened(shared_memory, "new", after, pages)
    assert new.kept == min(before, after)
    size = SHAPE.chunk_bytes(min(after, 16))
    address = new.take(0, size)
    length = 4096 * min(before, after, 16)
    assert ctypes.string_at(address, length) == b"a" * length
    ctypes.memset(address, ord("b"), size)
    assert os.read(pinned, 4096) == b"a" * 4096
    os.close(pinned)
    new.close(may_still_write=False)


def test_r20_slots_that_a_smaller_start_has_cut_off_are_not_kept_by_larger_ones(
    shared_memory: Path, pages: Path | None
) -> None:
    """The smaller and the first larger start end before their first report, so the file keeps its id."""
    old = opened(shared_memory, "old", 40, pages)
    old.begin()
    old.take(0, SHAPE.chunk_bytes(16))
    old.close(may_still_write=False)
    kept = list[tuple[int, bytes]]()
    for slots in (12, 40, 40):
        file = opened(shared_memory, str(len(kept)), slots, pages)
        kept.append((file.kept, file.previous))
        file.close(may_still_write=False)
    assert kept == [(12, old.id)] * 3
