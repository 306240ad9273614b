"""A rank's disk before its file is open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.slot_file import SlotShape, open_slot_file
from kvoffload.model.ids import JobId
from kvoffload.runtime.worker_disk import WorkerDisk
from kvoffload.testing import FakeClock, ManualExecutor
from tests.runtime.parts import IDENTITY

if TYPE_CHECKING:
    import pytest


def test_any_exception_of_its_opening_refuses_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> KVIdentity:
        raise MemoryError("no")

    nothing = cast("Any", None)
    shape, threads = SlotShape(0, 1, 4096, bytes(16)), ManualExecutor(held=False)
    disk = WorkerDisk(DiskPlace(tmp_path, fail), shape, 1 << 20, nothing, threads, FakeClock(), timeout_s=1.0)
    report = disk.take()
    assert report is not None
    assert not report.works
    assert "MemoryError: no" in caplog.text


def test_a_fetch_from_a_store_may_be_cancelled_while_the_disk_opens(tmp_path: Path) -> None:
    nothing = cast("Any", None)  # for an open file alone
    place = DiskPlace(tmp_path, lambda: nothing)
    shape, threads = SlotShape(0, 1, 4096, bytes(16)), ManualExecutor(held=True)
    disk = WorkerDisk(place, shape, 1 << 20, nothing, threads, FakeClock(), timeout_s=1.0)
    disk.cancel([JobId(3)])
    assert disk.take() is None


class Pauses:
    """Stands for the event of a disk that nobody closes: no wait of it takes time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return False


def test_a_slot_file_in_use_is_waited_for_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = DiskPlace(tmp_path, lambda: IDENTITY)
    nothing = cast("Any", None)
    shape, threads, pauses = SlotShape(0, 1, 4096, bytes(16)), ManualExecutor(held=True), Pauses()
    held = open_slot_file(place.make_folder(), shape, 4)
    disk = WorkerDisk(place, shape, 1 << 20, nothing, threads, FakeClock(), timeout_s=1.0)
    disk._closing = cast("Any", pauses)
    threads.release()
    held.close()
    assert sum(pauses.seconds) == 60
    assert caplog.text.count("disk_in_use") == 1
    assert caplog.text.count("disk_not_opened") == 1
