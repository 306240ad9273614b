from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.slot_file import SlotShape, open_slot_file
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.ids import JobId
from kvoffload.model.wire import Direction
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.testing import FakeClock, FakeDevice
from kvoffload.transfer.disk import FileOpening, RankDisk
from tests.gates import ManualExecutor, ThreadGate
from tests.runtime.parts import IDENTITY
from tests.transfer.rig import DONE, FAILED, TIMEOUT_S, ready_arena
from tests.transfer.tier_rig import LOAD, LONG_PAGES, PAGES, STORE, DiskRig


@pytest.mark.parametrize("pages", [PAGES, LONG_PAGES], ids=["in a buffer", "in place"])
def test_adjacent_disk_slots_are_read_and_written_in_one_call(tmp_path: Path, pages: Sequence[int]) -> None:
    rig, calls = DiskRig(tmp_path, pages=pages), list[tuple[Direction, int, int]]()

    def note(way: Direction, slot: int, data: Sequence[memoryview]) -> None:
        calls.append((way, slot, sum(map(len, data)) // rig.shape.pitch))

    for way in Direction:
        rig.before_each(way, partial(note, way))
    slots, places = [0, 4, 5, 11, 7], [3, 1, 2, 7, 6]
    data = [rig.fill(slot) for slot in slots]
    assert rig.copy(STORE, slots, places).sums == tuple(map(xxh3_64_intdigest, data))
    assert rig.copy(LOAD, [1, 2, 6, 10, 8], places).outcome is DONE
    assert [rig.slot(slot) for slot in (1, 2, 6, 10, 8)] == data
    assert calls == [(STORE, 1, 3), (STORE, 6, 2), (LOAD, 1, 3), (LOAD, 6, 2)]


def test_long_aligned_pages_are_written_and_read_in_place(tmp_path: Path) -> None:
    rig, addresses = DiskRig(tmp_path, pages=LONG_PAGES), list[int]()

    def note(_: int, pieces: Sequence[memoryview]) -> None:
        addresses.extend(np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces)

    for way, slots in ((STORE, (3, 9)), (LOAD, (0, 1))):
        rig.before_each(way, note)
        assert rig.copy(way, slots, [5, 6]).outcome is DONE
    pages = [page for slot in (3, 9, 0, 1) for page in rig.arena.pages(slot)]
    assert addresses == [np.frombuffer(page, np.uint8).ctypes.data for page in pages]


@pytest.fixture
def threads() -> DaemonExecutor:
    return DaemonExecutor("disk", 2)


def test_a_hanging_read_fails_all_queued_calls_and_changes_no_host_slot(
    tmp_path: Path, threads: DaemonExecutor
) -> None:
    rig, gate = DiskRig(tmp_path, threads), ThreadGate()
    rig.before_each(LOAD, lambda *_: gate.arrive())
    kept = [rig.fill(slot) for slot in range(6)]
    fetches = [rig.start(LOAD, [2 * job, 2 * job + 1], [2 * job, 7]) for job in range(3)]
    gate.wait_for_arrivals(2)
    assert rig.reports() == {}
    rig.clock.jump(TIMEOUT_S)
    reports = rig.reports()
    assert [(reports[fetch].outcome, reports[fetch].stuck) for fetch in fetches] == [(FAILED, ())] * 3
    assert rig.copy(STORE, [0], [5]).outcome is FAILED
    gate.open()
    while not rig.copies.calls.works:
        os.sched_yield()
    assert gate.arrivals == 2
    assert [rig.slot(slot) for slot in range(6)] == kept
    assert rig.reports() == {}
    assert rig.copy(STORE, [0], [0]).outcome is DONE
    rig.copies.close()


def hang(rig: DiskRig, way: Direction) -> None:
    """Copy slots 0 to 3 and places 4, 7, 5 and 0, while the call for places 4 and 5 hangs beyond the time limit.

    Check that the job's report names the positions under that call.
    """
    gate = ThreadGate()
    rig.before_each(way, lambda place, _: gate.arrive() if place == 4 else None)
    job = rig.start(way, [0, 1, 2, 3], [4, 7, 5, 0])
    gate.wait_for_arrivals(1)
    rig.clock.jump(TIMEOUT_S)
    report = rig.reports()[job]
    assert (report.outcome, report.stuck) == (FAILED, (0, 2))
    gate.open()
    while not rig.copies.calls.works:
        os.sched_yield()


def test_a_hanging_read_in_place_names_its_host_slots(tmp_path: Path, threads: DaemonExecutor) -> None:
    rig = DiskRig(tmp_path, threads, pages=LONG_PAGES)
    kept = [rig.fill(slot) for slot in range(4)]
    hang(rig, LOAD)
    assert [rig.slot(slot) == kept[slot] for slot in range(4)] == [False, True, False, False]
    rig.copies.close()


def test_a_hanging_write_names_its_disk_slots_and_stops_other_writes(
    tmp_path: Path, threads: DaemonExecutor
) -> None:
    rig = DiskRig(tmp_path, threads)
    data = [rig.fill(slot) for slot in range(4)]
    hang(rig, STORE)
    assert [rig.place(place) for place in (0, 4, 5)] == [data[3], data[0], data[2]]
    assert not rig.has(7)
    rig.copies.close()


def test_written_slots_are_synced_once_per_second(tmp_path: Path) -> None:
    rig, synced_at = DiskRig(tmp_path), list[float]()
    rig.file.sync = lambda: synced_at.append(rig.clock.monotonic())  # type: ignore[method-assign]

    def wait(seconds: float) -> None:
        rig.clock.jump(seconds)
        rig.ended()
        rig.ended()

    wait(1.0)
    assert synced_at == []
    for place in (0, 1):
        rig.copy(STORE, [0], [place])
        wait(0)
    for seconds in (0.9, 0.2, 5.0):
        wait(seconds)
    assert [at - synced_at[0] for at in synced_at] == pytest.approx([0, 1.1])


def test_a_sync_may_take_longer_than_a_call_and_no_other_begins_meanwhile(
    tmp_path: Path, threads: DaemonExecutor
) -> None:
    rig, gate, began_at = DiskRig(tmp_path, threads), ThreadGate(), list[float]()

    def sync() -> None:
        began_at.append(rig.clock.monotonic())
        if len(began_at) == 1:
            gate.arrive()

    rig.file.sync = sync  # type: ignore[method-assign]
    rig.copy(STORE, [0], [0])
    rig.clock.jump(1.0)
    rig.reports()
    gate.wait_for_arrivals(1)
    for place in (1, 2):
        rig.clock.jump(TIMEOUT_S)
        assert rig.copy(STORE, [0], [place]).outcome is DONE
    assert len(began_at) == 1
    gate.open()
    rig.copies.close()


def test_r17_with_a_tier_key_a_slots_bytes_are_valid_only_in_that_slot_and_file(tmp_path: Path) -> None:
    key = TierKey(bytes(32))
    rig = DiskRig(tmp_path, key=key)
    for slot in (0, 1):
        rig.fill(slot, seed=5)
    first, second = rig.copy(STORE, [0, 1], [0, 1]).sums
    assert first != second
    rig.sums[0] = second
    assert rig.copy(LOAD, [2, 3], [0, 1]).corrupt == (0,)
    another = tmp_path / "another"
    another.mkdir(0o700)
    other = DiskRig(another, key=key)
    other.fill(0, seed=5)
    assert other.copy(STORE, [0], [0]).sums != (first,)


# -- opening the disk -------------------------------------------------------------------------------------------------

SHAPE = SlotShape(0, 1, 4096, bytes(16))


def disk_at(place: DiskPlace, threads: Executor) -> RankDisk:
    arena = ready_arena(FakeDevice(4, [4096]), 4)
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
    assert not report.status.works
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

    disk._opening.closing = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    threads.release()
    held.close()
    report = disk.take()
    assert report is not None
    assert (report.status.works, sum(pauses)) == (is_released, 30 if is_released else 60)
    assert caplog.text.count("disk_in_use") == 1
    assert caplog.text.count("disk_not_opened") == (not is_released)
