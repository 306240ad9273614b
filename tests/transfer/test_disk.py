from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, cast

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.slot_file import SlotFile, SlotShape, open_slot_file
from kvoffload.disk.system import aligned_buffer
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, JobReport, Tier
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.testing import FakeClock, FakeDevice
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.disk import RankDisk
from kvoffload.transfer.factory import make_checksums
from kvoffload.transfer.host_memory import MmapAllocator
from tests.gates import ManualExecutor, ThreadGate

DONE, FAILED, CORRUPT = CopyOutcome.DONE, CopyOutcome.FAILED, CopyOutcome.CORRUPT
PAGES = [640, 96, 5000]
# Pages of these sizes are read and written in place. One size is hashed in pieces, the other as a whole.
LONG_PAGES = [2**16 + 4096, 2**17 + 4096]
TIMEOUT_S = 2.0
RANK = 1


class Opening:
    """An opening of the disk tier whose file is already open."""

    def __init__(self, file: SlotFile) -> None:
        self.shape = file.shape
        self.slots = file.slots
        self.closing = Event()
        self.open = lambda: file


class Rig:
    """A mover with twelve host slots in chunks of five, and a file of eight slots."""

    def __init__(
        self,
        folder: Path,
        executor: ManualExecutor | DaemonExecutor,
        *,
        verify: str = "off",
        pages: Sequence[int] = PAGES,
        key: TierKey | None = None,
    ) -> None:
        self.pages = pages
        self.device = FakeDevice(4, pages)
        size = self.device.layout.slot_bytes
        memory = MmapAllocator(ManualExecutor(held=False))
        self.arena = Arena(self.device.layout, 12, memory, chunk_bytes=5 * size)
        asyncio.run(self.arena.prepare())
        self.shape = SlotShape(RANK, 2, size, b"a rank's layout.")
        self.path = folder / f"slots{RANK}"
        self.file = open_slot_file(open_folder(folder), self.shape, 8)
        self.clock = FakeClock()
        self.executor = executor
        self.checksums = make_checksums(verify, self.arena, executor=ManualExecutor(held=False))
        self.copies = RankDisk(
            cast("Any", Opening(self.file)),
            self.arena,
            executor,
            self.clock,
            timeout_s=TIMEOUT_S,
            checksums=self.checksums,
            key=key,
        )
        if isinstance(executor, ManualExecutor):
            executor.run_all()
        while self.copies.take() is None:
            os.sched_yield()
        self.open_jobs: set[JobId] = set()
        self._jobs = 0

    def fill(self, slot: int, seed: int) -> bytes:
        """Fill a host slot with random bytes; return these bytes."""
        parts = [Random(seed * 10 + region).randbytes(size) for region, size in enumerate(self.pages)]
        for region, part in enumerate(parts):
            self.arena.pages(slot)[region][:] = part
        return b"".join(parts)

    def slot(self, slot: int) -> bytes:
        return b"".join(self.arena.pages(slot))

    def place(self, place: int) -> bytes:
        buffer = aligned_buffer(self.shape.pitch)
        self.file.read(place, [buffer])
        return bytes(buffer[: self.shape.slot_bytes])

    def spill(self, slots: list[int], places: list[int]) -> JobId:
        return self._submit(Direction.STORE, slots, places, ())

    def fetch(self, slots: list[int], places: list[int], sums: list[int]) -> JobId:
        return self._submit(Direction.LOAD, slots, places, tuple((0, each) for each in sums))

    def _submit(
        self, way: Direction, slots: list[int], places: list[int], sums: tuple[tuple[int, ...], ...]
    ) -> JobId:
        job = JobId(self._jobs)
        self._jobs += 1
        self.open_jobs.add(job)
        self.copies.submit(
            [CopyJob(job, way, Tier.DISK, tuple(map(SlotId, slots)), tuple(map(SlotId, places)), sums)]
        )
        return job

    def reports(self) -> dict[JobId, JobReport]:
        found = self.copies.take()
        assert found is not None
        self.open_jobs -= {report.job for report in found.jobs}
        return {report.job: report for report in found.jobs}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, ManualExecutor(held=False))


@pytest.fixture(params=[PAGES, LONG_PAGES], ids=["in a buffer", "in place"])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(tmp_path, ManualExecutor(held=False), pages=request.param)


@pytest.fixture
def held(tmp_path: Path) -> Rig:
    return Rig(tmp_path, ManualExecutor())


@pytest.fixture
def threaded(tmp_path: Path) -> Rig:
    return Rig(tmp_path, DaemonExecutor("disk", 2))


def test_spilled_blocks_are_fetched_into_other_slots(each: Rig) -> None:
    rig = each
    slots = [0, 4, 5, 11]
    data = [rig.fill(slot, seed=slot) for slot in slots]
    spill = rig.spill(slots, [7, 0, 3, 1])
    report = rig.reports()[spill]
    assert (report.outcome, report.copied_bytes) == (DONE, sum(map(len, data)))
    assert report.sums == tuple(map(xxh3_64_intdigest, data))
    fetch = rig.fetch([1, 2, 6, 10], [7, 0, 3, 1], list(report.sums))
    assert rig.reports()[fetch].outcome is DONE
    assert [rig.slot(slot) for slot in (1, 2, 6, 10)] == data
    assert not rig.open_jobs


def test_adjacent_disk_slots_are_read_and_written_in_one_call(
    each: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = each
    calls: list[tuple[str, int, int]] = []
    for name in ("write", "read"):
        real = getattr(rig.file, name)

        def call(slot: int, data: Sequence[memoryview], name: str = name, real: Any = real) -> None:  # noqa: ANN401
            calls.append((name, slot, sum(map(len, data)) // rig.shape.pitch))
            real(slot, data)

        monkeypatch.setattr(rig.file, name, call)
    slots, places = [0, 4, 5, 11, 7], [3, 1, 2, 7, 6]
    data = [rig.fill(slot, seed=slot) for slot in slots]
    spill = rig.spill(slots, places)
    report = rig.reports()[spill]
    assert report.sums == tuple(map(xxh3_64_intdigest, data))
    fetch = rig.fetch([1, 2, 6, 10, 8], places, list(report.sums))
    assert rig.reports()[fetch].outcome is DONE
    assert [rig.slot(slot) for slot in (1, 2, 6, 10, 8)] == data
    assert calls == [("write", 1, 3), ("write", 6, 2), ("read", 1, 3), ("read", 6, 2)]


def test_long_aligned_pages_are_written_and_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, ManualExecutor(held=False), pages=LONG_PAGES)
    addresses = list[int]()
    for name in ("write", "read"):
        real = getattr(rig.file, name)

        def call(slot: int, pieces: Sequence[memoryview], real: Any = real) -> None:  # noqa: ANN401
            addresses.extend(np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces)
            real(slot, pieces)

        monkeypatch.setattr(rig.file, name, call)
    data = [rig.fill(slot, seed=slot) for slot in (3, 9)]
    spill = rig.spill([3, 9], [5, 6])
    sums = rig.reports()[spill].sums
    fetch = rig.fetch([0, 1], [5, 6], list(sums))
    assert rig.reports()[fetch].outcome is DONE
    assert [rig.slot(0), rig.slot(1)] == data
    pages = [page for slot in (3, 9, 0, 1) for page in rig.arena.pages(slot)]
    assert addresses == [np.frombuffer(page, np.uint8).ctypes.data for page in pages]


def test_r17_changed_bytes_in_a_disk_slot_are_reported_as_corrupt(each: Rig) -> None:
    rig = each
    right = rig.fill(0, seed=0)
    rig.spill([0, 1], [0, 1])
    first, second = rig.reports()[JobId(0)].sums
    with rig.path.open("r+b") as file:
        file.seek(4096 + rig.shape.pitch + 5000)
        file.write(b"\x01")
        file.flush()
        os.fsync(file.fileno())
    fetch = rig.fetch([3, 2], [0, 1], [first, second])
    report = rig.reports()[fetch]
    assert (report.outcome, report.corrupt, report.copied_bytes) == (CORRUPT, (1,), 0)
    assert rig.slot(3) == right


def test_r17_another_blocks_bytes_are_reported_as_corrupt(each: Rig) -> None:
    rig = each
    rig.fill(0, seed=0)
    first = rig.spill([0], [0])
    old = rig.reports()[first].sums[0]
    rig.fill(0, seed=1)
    rig.spill([0], [0])
    rig.reports()
    fetch = rig.fetch([1], [0], [old])
    assert rig.reports()[fetch].outcome is CORRUPT


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_r17_a_host_slot_that_changed_since_its_store_is_not_written(tmp_path: Path, verify: str) -> None:
    rig = Rig(tmp_path, ManualExecutor(held=False), verify=verify)
    assert rig.checksums is not None
    for slot in range(3):
        rig.fill(slot, seed=slot)
        rig.checksums.take(slot)
    before = rig.path.read_bytes()
    for region in range(len(PAGES)):
        rig.arena.pages(1)[region][:] = bytes(PAGES[region])
    spill = rig.spill([0, 1, 2], [4, 5, 6])
    report = rig.reports()[spill]
    assert (report.outcome, report.corrupt, report.sums) == (CORRUPT, (1,), ())
    place = slice(4096 + 5 * rig.shape.pitch, 4096 + 6 * rig.shape.pitch)
    assert rig.path.read_bytes()[place] == before[place]


@pytest.mark.parametrize("pages", [PAGES, LONG_PAGES])
@pytest.mark.parametrize("verify", ["sample", "full"])
def test_later_reads_are_compared_with_the_fetched_checksum(
    tmp_path: Path, verify: str, pages: Sequence[int]
) -> None:
    rig = Rig(tmp_path, ManualExecutor(held=False), verify=verify, pages=pages)
    assert rig.checksums is not None
    rig.fill(0, seed=0)
    rig.checksums.take(0)
    spill = rig.spill([0], [0])
    [known] = rig.reports()[spill].sums
    fetch = rig.fetch([1], [0], [known])
    assert rig.reports()[fetch].outcome is DONE
    assert not rig.checksums.changed([1])


def test_a_cancelled_fetch_starts_no_more_reads(held: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = held
    data = [rig.fill(slot, seed=slot) for slot in range(3)]
    rig.spill([0, 1], [0, 1])
    rig.executor.run_all()  # type: ignore[union-attr]
    known = list(rig.reports()[JobId(0)].sums)
    first, second, other = (
        rig.fetch([2], [0], known[:1]),
        rig.fetch([1], [1], known[1:]),
        rig.fetch([3], [0], known[:1]),
    )
    rig.fill(1, seed=7)
    real = rig.file.read

    def read(slot: int, into: Sequence[memoryview]) -> None:
        rig.copies.cancel((first, second))
        real(slot, into)

    monkeypatch.setattr(rig.file, "read", read)
    rig.executor.run_all()  # type: ignore[union-attr]
    outcomes = {job: report.outcome for job, report in rig.reports().items()}
    assert outcomes == {first: DONE, second: FAILED, other: DONE}
    assert (rig.slot(2), rig.slot(3)) == (data[0], data[0])
    assert rig.slot(1) != data[1]
    assert not rig.open_jobs


def test_a_jobs_copy_time_is_from_its_first_call_to_its_last(held: Rig) -> None:
    rig = held
    real = rig.file.write

    def write(slot: int, data: Sequence[memoryview]) -> None:
        rig.clock.jump(0.5)
        real(slot, data)

    rig.file.write = write  # type: ignore[method-assign]
    job = rig.spill([0, 1], [0, 2])
    rig.clock.jump(3.0)
    rig.executor.run_all()  # type: ignore[union-attr]
    rig.clock.jump(0.25)
    report = rig.reports()[job]
    assert (report.copy_s, report.queue_s) == (1.0, 3.25)


def failing(rig: Rig, name: str, number: int) -> Callable[[], None]:
    """Make a method of the file fail; return a function that ends the failures."""
    real = getattr(rig.file, name)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    setattr(rig.file, name, fail)
    return lambda: setattr(rig.file, name, real)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ENODEV])
def test_a_failed_write_fails_only_its_job(rig: Rig, number: int) -> None:
    heal = failing(rig, "write", number)
    lost = rig.spill([0], [0])
    report = rig.reports()[lost]
    assert (report.outcome, report.sums, report.stuck) == (FAILED, (), ())
    heal()
    assert rig.copies.calls.works
    assert rig.reports() == {}
    assert rig.spill([0], [0]) in (done := rig.reports())
    assert {report.outcome for report in done.values()} == {DONE}


def test_a_failed_read_fails_its_job(rig: Rig) -> None:
    rig.spill([0], [0])
    [known] = rig.reports()[JobId(0)].sums
    failing(rig, "read", errno.EIO)
    fetch = rig.fetch([1], [0], [known])
    assert rig.reports()[fetch].outcome is FAILED


@pytest.fixture
def gate(threaded: Rig) -> Iterator[ThreadGate]:
    """Yield a gate at which every call to the file waits."""
    gate = ThreadGate()
    for name in ("read", "write"):
        _hold(threaded.file, name, gate)
    yield gate
    gate.open()
    threaded.copies.close()


def _hold(file: SlotFile, name: str, gate: ThreadGate) -> None:
    real = getattr(file, name)

    def wait(*args: object) -> None:
        gate.arrive()
        real(*args)

    setattr(file, name, wait)


def wait_for(rig: Rig, job: JobId) -> JobReport:
    while job not in (found := rig.reports()):
        os.sched_yield()
    return found[job]


def wait_until_closed(rig: Rig) -> None:
    again = None
    with open_folder(rig.path.parent) as folder:
        while again is None:
            try:
                again = open_slot_file(folder, rig.shape, 8)
            except DiskError:
                os.sched_yield()
    again.close()


def test_a_hanging_read_fails_all_queued_calls_and_changes_no_host_slot(
    threaded: Rig, gate: ThreadGate
) -> None:
    rig = threaded
    kept = [rig.fill(slot, seed=slot) for slot in range(6)]
    zeros = xxh3_64_intdigest(bytes(rig.shape.slot_bytes))  # the checksum of a slot that was never written
    fetches = [rig.fetch([2 * job, 2 * job + 1], [2 * job, 7], [zeros] * 2) for job in range(3)]
    gate.wait_for_arrivals(2)
    assert rig.reports() == {}
    rig.clock.jump(TIMEOUT_S)
    reports = rig.reports()
    assert [(reports[fetch].outcome, reports[fetch].stuck) for fetch in fetches] == [(FAILED, ())] * 3
    assert not rig.copies.calls.works
    late = rig.spill([0], [5])
    assert rig.reports()[late].outcome is FAILED
    gate.open()
    while not rig.copies.calls.works:
        os.sched_yield()
    assert gate.arrivals == 2
    assert [rig.slot(slot) for slot in range(6)] == kept
    assert rig.reports() == {}
    again = rig.spill([0], [0])
    assert wait_for(rig, again).outcome is DONE


def test_a_hanging_read_in_place_names_its_host_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, gate = Rig(tmp_path, DaemonExecutor("disk", 2), pages=LONG_PAGES), ThreadGate()
    zeros = xxh3_64_intdigest(bytes(rig.shape.slot_bytes))  # the checksum of a slot that was never written
    kept = [rig.fill(slot, seed=slot) for slot in range(4)]
    real = rig.file.read

    def hang(slot: int, pieces: Sequence[memoryview]) -> None:
        if slot == 4:
            gate.arrive()
        real(slot, pieces)

    monkeypatch.setattr(rig.file, "read", hang)
    fetch = rig.fetch([0, 1, 2, 3], [4, 7, 5, 0], [zeros] * 4)
    gate.wait_for_arrivals(1)
    rig.clock.jump(TIMEOUT_S)
    report = rig.reports()[fetch]
    assert (report.outcome, report.stuck) == (FAILED, (0, 2))
    gate.open()
    while not rig.copies.calls.works:
        os.sched_yield()
    assert [rig.slot(slot) == kept[slot] for slot in range(4)] == [False, True, False, False]
    rig.copies.close()


def test_a_hanging_write_names_its_disk_slots_and_stops_other_writes(
    threaded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, gate, write = threaded, ThreadGate(), threaded.file.write
    data = [rig.fill(slot, seed=slot) for slot in range(4)]

    def hang(slot: int, pieces: Sequence[memoryview]) -> None:
        if slot == 4:
            gate.arrive()
        write(slot, pieces)

    monkeypatch.setattr(rig.file, "write", hang)
    spill = rig.spill([0, 1, 2, 3], [4, 7, 5, 0])
    gate.wait_for_arrivals(1)
    rig.clock.jump(TIMEOUT_S)
    report = rig.reports()[spill]
    assert (report.outcome, report.stuck) == (FAILED, (0, 2))
    gate.open()
    while not rig.copies.calls.works:
        os.sched_yield()
    assert [rig.place(place) for place in (0, 4, 5)] == [data[3], data[0], data[2]]
    assert rig.place(7) == bytes(rig.shape.slot_bytes)
    rig.copies.close()


def test_a_read_that_returns_after_the_end_changes_no_host_memory(threaded: Rig, gate: ThreadGate) -> None:
    rig = threaded
    kept = rig.fill(0, seed=0)
    rig.fetch([0], [0], [xxh3_64_intdigest(bytes(rig.shape.slot_bytes))])
    gate.wait_for_arrivals(1)
    rig.copies.close()
    gate.open()
    wait_until_closed(rig)
    assert rig.slot(0) == kept


@pytest.mark.parametrize("way", Direction)
def test_host_memory_stays_until_the_copies_that_read_or_write_it_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Direction
) -> None:
    rig, gate = Rig(tmp_path, DaemonExecutor("disk", 2), verify="full", pages=[2**17]), ThreadGate()
    assert rig.checksums is not None
    name = "changed" if way is Direction.STORE else "take"
    real, found = getattr(rig.checksums, name), list[bytes]()

    def wait(*slots: Any) -> Any:  # noqa: ANN401
        gate.arrive()
        found.append(rig.slot(0))
        return real(*slots)

    monkeypatch.setattr(rig.checksums, name, wait)
    kept = rig.fill(0, seed=0) if way is Direction.STORE else bytes(rig.shape.slot_bytes)
    if way is Direction.STORE:
        rig.spill([0], [0])
    else:
        rig.fetch([0], [0], [xxh3_64_intdigest(kept)])
    gate.wait_for_arrivals(1)
    rig.copies.close()
    rig.arena.close()
    gate.open()
    wait_until_closed(rig)
    assert found == [kept]
    assert rig.arena.ready_slots == 0


def test_a_copy_after_the_host_memory_was_freed_changes_nothing(held: Rig) -> None:
    rig = held
    rig.spill([0], [0])
    rig.fetch([1], [1], [xxh3_64_intdigest(bytes(rig.shape.slot_bytes))])
    rig.arena.close()
    rig.executor.run_all()  # type: ignore[union-attr]
    assert [report.outcome for report in rig.reports().values()] == [FAILED, FAILED]


def test_every_job_ends_whether_threads_are_idle_or_busy(threaded: Rig) -> None:
    rig = threaded
    for number in range(200):
        job = rig.spill([number % 12], [number % 8])
        if number % 3 == 0:
            wait_for(rig, job)
    while rig.open_jobs:
        rig.reports()
        os.sched_yield()
    rig.copies.close()


def test_written_slots_are_synced_once_per_second(rig: Rig) -> None:
    syncs: list[None] = []
    rig.file.sync = lambda: syncs.append(None)  # type: ignore[method-assign]
    rig.clock.jump(1.0)
    rig.reports()
    assert syncs == []
    rig.spill([0], [0])
    rig.reports()
    rig.spill([0], [1])
    rig.reports()
    assert len(syncs) == 1
    rig.clock.jump(0.9)
    rig.reports()
    assert len(syncs) == 1
    rig.clock.jump(0.2)
    rig.reports()
    rig.clock.jump(5)
    rig.reports()
    assert len(syncs) == 2


@pytest.mark.parametrize("pages", [PAGES, LONG_PAGES], ids=["in a buffer", "in place"])
@pytest.mark.parametrize("key", [None, TierKey(bytes(32))], ids=["no key", "key"])
def test_r17_with_a_tier_key_bytes_replaced_with_their_checksum_are_not_used(
    tmp_path: Path, key: TierKey | None, pages: Sequence[int]
) -> None:
    rig = Rig(tmp_path, ManualExecutor(held=False), pages=pages, key=key)
    was = rig.fill(0, seed=0)
    spill = rig.spill([0], [0])
    sums = rig.reports()[spill].sums
    forged = Random(7).randbytes(rig.shape.slot_bytes)
    buffer = aligned_buffer(rig.shape.pitch)
    buffer[: len(forged)] = forged
    rig.file.write(1, [buffer])
    fetch = rig.fetch([2, 3], [0, 1], [*sums, xxh3_64_intdigest(forged)])
    report = rig.reports()[fetch]
    assert report.corrupt == (() if key is None else (1,))
    assert rig.slot(2) == was
    assert (rig.slot(3) == forged) is (key is None or rig.pages is LONG_PAGES)


def test_r17_with_a_tier_key_a_slots_bytes_are_valid_only_in_that_slot_and_file(tmp_path: Path) -> None:
    rig, key = Rig(tmp_path, ManualExecutor(held=False), key=TierKey(bytes(32))), TierKey(bytes(32))
    for slot in (0, 1):
        rig.fill(slot, seed=5)
    spill = rig.spill([0, 1], [0, 1])
    first, second = rig.reports()[spill].sums
    assert first != second
    fetch = rig.fetch([2, 3], [0, 1], [second, second])
    assert rig.reports()[fetch].corrupt == (0,)
    another = tmp_path / "another"
    another.mkdir(0o700)
    other = Rig(another, ManualExecutor(held=False), key=key)
    other.fill(0, seed=5)
    spill = other.spill([0], [0])
    assert other.reports()[spill].sums != (first,)
