from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.slot_file import SlotShape, open_slot_file
from kvoffload.model.ids import JobId
from kvoffload.testing import FakeClock, FakeDevice
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.disk import FileOpening, RankDisk
from kvoffload.transfer.host_memory import MmapAllocator
from tests.gates import ManualExecutor
from tests.runtime.parts import IDENTITY

if TYPE_CHECKING:
    from concurrent.futures import Executor

SHAPE = SlotShape(0, 1, 4096, bytes(16))


def disk_at(place: DiskPlace, threads: Executor) -> RankDisk:
    layout = FakeDevice(4, [4096]).layout
    arena = Arena(layout, 4, MmapAllocator(ManualExecutor(held=False)))
    return RankDisk(FileOpening(place, SHAPE, 1 << 20), arena, threads, FakeClock(), timeout_s=1.0)


def has_no_memory() -> KVIdentity:
    raise MemoryError("no")


def has_no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("identify", "reason"), [(has_no_memory, "MemoryError: no"), (lambda: IDENTITY, "no room for")]
)
def test_any_exception_while_opening_closes_the_disk(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    identify: Callable[[], KVIdentity],
    reason: str,
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", has_no_room)
    report = disk_at(DiskPlace(tmp_path, identify), ManualExecutor(held=False)).take()
    assert report is not None
    assert not report.works
    assert reason in caplog.text


def test_a_fetch_from_a_store_may_be_cancelled_while_the_disk_opens(tmp_path: Path) -> None:
    disk = disk_at(DiskPlace(tmp_path, lambda: IDENTITY), ManualExecutor())
    disk.cancel([JobId(3)])
    assert disk.take() is None


@pytest.mark.parametrize("is_released", [True, False])
def test_a_slot_file_in_use_is_tried_for_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_released: bool
) -> None:
    place, threads = DiskPlace(tmp_path, lambda: IDENTITY), ManualExecutor()
    held = open_slot_file(place.make_folder(), SHAPE, 4)
    disk, pauses = disk_at(place, threads), list[float]()

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        if is_released and sum(pauses) >= 30:
            held.close()
        return False  # the disk is not being closed

    disk._opening.closing = cast("Any", SimpleNamespace(wait=wait))
    threads.release()
    held.close()
    report = disk.take()
    assert report is not None
    assert (report.works, sum(pauses)) == (is_released, 30 if is_released else 60)
    assert caplog.text.count("disk_in_use") == 1
    assert caplog.text.count("disk_not_opened") == (not is_released)
