"""One rank's host memory in a file: where its bytes are if the next process has another number of slots."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffload.disk.identity import KVIdentity
from kvoffload.model.errors import HostMemoryError
from kvoffload.node.file_systems import free_bytes
from kvoffload.node.folder import HostPlace
from kvoffload.testing import FakeDevice
from kvoffload.transfer import host_file
from kvoffload.transfer.host_file import HostFile, RankShape, open_host_file
from tests.mounts import mounted

LAYOUT = FakeDevice(4, [4096, 1024]).layout
SHAPE = RankShape(0, LAYOUT, 16)


@pytest.fixture(params=["tmpfs", "hugetlbfs"])
def pages(request: pytest.FixtureRequest) -> Path | None:
    """Return the folder that has the memory itself; None if `host_path` has it."""
    return request.getfixturevalue("huge_pages") if request.param == "hugetlbfs" else None


def opened(root: Path, engine: str, slots: int, pages: Path | None = None, chunk_slots: int = 16) -> HostFile:
    place = HostPlace(root, "kind", engine, lambda: KVIdentity("", "", "", {}), pages)
    return open_host_file(place.claim(), RankShape(0, LAYOUT, chunk_slots, page=place.page), slots, pages)


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


def test_a_relative_folder_for_huge_pages_is_found_from_another_place(
    shared_memory: Path, huge_pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(huge_pages.parent)
    old = opened(shared_memory, "old", 10, Path(huge_pages.name))
    old.begin()
    old.close(may_still_write=False)
    monkeypatch.chdir("/")
    new = opened(shared_memory, "new", 10, huge_pages)
    assert (new.previous, len(os.listdir(huge_pages))) == (old.id, 1)
    new.close(may_still_write=False)


@pytest.mark.parametrize("seems_roomy", [False, True])
def test_a_full_tmpfs_is_an_error_and_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch, seems_roomy: bool
) -> None:
    """It may also fill up after its room was asked for."""
    with mounted("tmpfs", "size=128k") as root:
        file = opened(root, "engine", 40)
        file.take(0, SHAPE.chunk_bytes(16))
        if seems_roomy:
            monkeypatch.setattr(host_file, "_has_room", lambda descriptor, size: True)
        with pytest.raises(HostMemoryError, match="has no room for 81920 more bytes"):
            file.take(16, SHAPE.chunk_bytes(16))
        file.close(may_still_write=False)


def test_engines_that_fill_a_tmpfs_at_the_same_time_leave_what_is_less_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them ask for room before the first one takes any."""
    size, populate = SHAPE.chunk_bytes(16), host_file._populate
    with mounted("tmpfs", "size=400k") as root:
        files = [opened(root, str(number), 16) for number in range(8)]
        waiting = [*files]

        def take_next(*args: Any) -> None:  # noqa: ANN401  # of the real function
            if waiting:
                with suppress(HostMemoryError):
                    waiting.pop().take(0, size)
            populate(*args)

        monkeypatch.setattr(host_file, "_populate", take_next)
        before = free_bytes(root)
        with suppress(HostMemoryError):
            waiting.pop().take(0, size)
        assert free_bytes(root) == before % size
        for file in files:
            file.close(may_still_write=False)


def test_a_system_that_cannot_populate_memory_at_once_touches_every_page(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.14."""
    monkeypatch.setattr(host_file, "_WRITE", 199)
    file = opened(shared_memory, "engine", 16)
    file.take(0, SHAPE.chunk_bytes(16))
    assert os.fstat(file.files[0]).st_blocks * 512 == 4096 + SHAPE.chunk_bytes(16)
    file.close(may_still_write=False)


def test_memory_on_a_tmpfs_that_has_huge_pages_on_advice_gets_them() -> None:
    with mounted("tmpfs", "huge=advise") as root:
        file = opened(root, "engine", 2048, chunk_slots=2048)
        file.take(0, 2048 * LAYOUT.slot_bytes)
        (found,) = re.findall(
            rf"{root}.*?ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.S
        )
        assert int(found) >= 8192
        file.close(may_still_write=False)
