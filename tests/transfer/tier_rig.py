"""Jobs between host slots and a lower tier: a disk, or a remote tier in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

from xxhash import xxh3_64_intdigest

from kvoffload.disk.open_folder import open_folder
from kvoffload.disk.slot_file import SlotShape, open_slot_file
from kvoffload.disk.system import aligned_buffer
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.ids import BlockKey, JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, JobReport, Tier
from kvoffload.remote.values import TRAILER_BYTES, Shard, seal
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.testing import FakeClock, FakeDevice
from kvoffload.transfer.disk import RankDisk
from kvoffload.transfer.factory import make_checksums
from kvoffload.transfer.layout import digest_of
from kvoffload.transfer.remote import RemoteMover, remote_calls
from kvoffload.transfer.tier_jobs import TierJobs
from tests.gates import ManualExecutor
from tests.remote.fake_store import FakeStore
from tests.transfer.rig import TIMEOUT_S, ready_arena

STORE, LOAD = Direction.STORE, Direction.LOAD
PAGES = [640, 96, 5000]
# Pages of these sizes are read and written in place. One size is hashed in pieces, the other as a whole.
LONG_PAGES = [2**16 + 4096, 2**17 + 4096]
RANK = 1
KEYS = tuple(BlockKey(bytes([number]) * 5) for number in range(8))
SHARD = Shard("print/one", RANK, 2)


class TierRig:
    """Twelve host slots in chunks of five, and eight places in a tier. Jobs copy from slots to places and back."""

    tier: Tier
    copies: TierJobs

    def __init__(
        self, executor: DaemonExecutor | None = None, *, verify: str = "off", pages: Sequence[int] = PAGES
    ) -> None:
        self.pages = pages
        self.arena = ready_arena(FakeDevice(4, pages), 12, chunk_slots=5)
        self.layout = self.arena.layout
        self.clock = FakeClock()
        self._manual = ManualExecutor()
        self.executor = executor or self._manual
        self.checksums = make_checksums(verify, self.arena, executor=ManualExecutor(held=False))
        self._jobs: list[Sequence[int]] = []

    def fill(self, slot: int, seed: int | None = None) -> bytes:
        """Fill a host slot with random bytes; return these bytes."""
        for region, size in enumerate(self.pages):
            data = Random((slot if seed is None else seed) * 10 + region).randbytes(size)
            self.arena.pages(slot)[region][:] = data
        if self.checksums is not None:
            self.checksums.take(slot)
        return self.slot(slot)

    def slot(self, slot: int) -> bytes:
        return b"".join(self.arena.pages(slot))

    def start(self, way: Direction, slots: Sequence[int], places: Sequence[int]) -> JobId:
        job = JobId(len(self._jobs))
        self._jobs.append(places)
        targets, extra = self._job(way, places)
        self.copies.submit(CopyJob(job, way, self.tier, tuple(map(SlotId, slots)), targets, extra))
        return job

    def copy(self, way: Direction, slots: Sequence[int], places: Sequence[int]) -> JobReport:
        job = self.start(way, slots, places)
        while job not in (found := self.ended()):
            os.sched_yield()
        return found[job]

    def ended(self) -> dict[JobId, JobReport]:
        """Run the calls that the test runs; return the reports of the jobs that have ended."""
        self._manual.run_all()
        return self.reports()

    def reports(self) -> dict[JobId, JobReport]:
        found = self.copies.take()
        assert found is not None
        return {report.job: report for report in found.jobs}

    def before_each(self, way: Direction, act: Callable[..., object]) -> None:
        """Call `act` before each call to the tier in this direction, with its arguments."""
        owner, name = self._operation(way)
        real = getattr(owner, name)

        def call(*arguments: object) -> object:
            act(*arguments)
            return real(*arguments)

        setattr(owner, name, call)

    def _job(self, way: Direction, places: Sequence[int]) -> tuple[Any, Any]:
        """Return the job's targets, and what else the tier needs."""
        raise NotImplementedError

    def _operation(self, way: Direction) -> tuple[object, str]:
        """Return the object that makes the tier's calls, and the name of its method."""
        raise NotImplementedError


class DiskRig(TierRig):
    """A slot file as the tier. `sums` has the checksum of each place."""

    tier = Tier.DISK

    def __init__(
        self,
        folder: Path,
        executor: DaemonExecutor | None = None,
        *,
        key: TierKey | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(executor, **options)
        self.shape = SlotShape(RANK, 2, self.layout.slot_bytes, b"a rank's layout.")
        self.is_in_place = self.pages is LONG_PAGES
        self.path = folder / f"slots{RANK}"
        self.file = file = open_slot_file(open_folder(folder), self.shape, 8)
        opening: Any = SimpleNamespace(shape=file.shape, slots=8, closing=Event(), open=lambda: file)
        places = opening, self.arena, self.executor, self.clock
        self.copies: RankDisk = RankDisk(*places, timeout_s=TIMEOUT_S, checksums=self.checksums, key=key)
        while self.copies.take() is None:
            self._manual.run_all()
            os.sched_yield()
        self.sums = [xxh3_64_intdigest(bytes(self.shape.slot_bytes))] * 8  # nothing was written yet

    def reports(self) -> dict[JobId, JobReport]:
        found = super().reports()
        for job, report in found.items():
            for place, known in zip(self._jobs[job], report.sums, strict=False):
                self.sums[place] = known
        return found

    def _job(self, way: Direction, places: Sequence[int]) -> tuple[Any, Any]:
        sums = () if way is STORE else tuple((0, self.sums[place]) for place in places)
        return tuple(map(SlotId, places)), sums

    def _operation(self, way: Direction) -> tuple[object, str]:
        return self.file, "write" if way is STORE else "read"

    def place(self, place: int) -> bytes:
        buffer = aligned_buffer(self.shape.pitch)
        self.file.read(place, [buffer])
        return bytes(buffer[: self.shape.slot_bytes])

    def has(self, place: int) -> bool:
        return any(self.place(place))

    def overwrite(self, place: int, data: bytes) -> None:
        buffer = aligned_buffer(self.shape.pitch)
        buffer[: len(data)] = data
        self.file.write(place, [buffer])

    def forge(self, place: int, data: bytes) -> None:
        """Write bytes with their right checksum."""
        self.overwrite(place, data)
        self.sums[place] = xxh3_64_intdigest(data)

    def harm(self, place: int, how: str) -> None:
        data = bytearray(self.place(place))
        data[77] ^= 1
        self.overwrite(place, self.place(0) if how == "swap" else bytes(data))


class RemoteRig(TierRig):
    """A fake store as the tier. A place is a key."""

    tier = Tier.REMOTE
    is_in_place = False

    def __init__(
        self,
        *,
        key: TierKey | None = None,
        store: FakeStore | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**options)
        self.store = store or FakeStore()
        calls = remote_calls(lambda: self.store, self.executor, self.clock.monotonic, TIMEOUT_S)
        mover = RemoteMover(RANK, 2, self.arena, self.checksums, key)
        self.copies = TierJobs(Tier.REMOTE, calls, mover, self.layout.slot_bytes, self.clock.monotonic)
        self.reports()
        self.ended()
        assert calls.works

    def _job(self, way: Direction, places: Sequence[int]) -> tuple[Any, Any]:
        return tuple(KEYS[place] for place in places), SHARD.namespace

    def _operation(self, way: Direction) -> tuple[object, str]:
        return self.store, "put" if way is STORE else "get"

    def has(self, place: int) -> bool:
        return SHARD.name(KEYS[place]) in self.store.values

    def forge(self, place: int, data: bytes) -> None:
        value = bytearray(data + bytes(TRAILER_BYTES))
        name = SHARD.name(KEYS[place])
        seal(memoryview(value), name, digest_of(self.layout))
        self.store.values[name] = bytes(value)

    def harm(self, place: int, how: str) -> None:
        name = SHARD.name(KEYS[place])
        value = self.store.values[name]
        self.store.values[name] = {
            "flip": value[:77] + bytes([value[77] ^ 1]) + value[78:],
            "swap": self.store.values[SHARD.name(KEYS[0])],
            "cut": value[:-100],
            "empty": b"",
            "trailer": value[:-1] + bytes([value[-1] ^ 1]),
        }[how]
