from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvoffload.disk.tier_key import TierKey
from kvoffload.model.causes import CopyOutcome, RemoteFault
from kvoffload.model.ids import BlockKey, JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, JobReport, Tier
from kvoffload.remote.values import TRAILER_BYTES, Shard, seal
from kvoffload.testing import FakeClock, FakeDevice
from kvoffload.transfer import remote
from kvoffload.transfer.arena import Arena
from kvoffload.transfer.factory import make_checksums
from kvoffload.transfer.host_memory import MmapAllocator
from kvoffload.transfer.layout import digest_of
from kvoffload.transfer.remote import RemoteMover, remote_calls
from kvoffload.transfer.tier_jobs import TierJobs, TierReport
from tests.gates import ManualExecutor
from tests.remote.fake_store import FakeStore

DONE, FAILED, CORRUPT = CopyOutcome.DONE, CopyOutcome.FAILED, CopyOutcome.CORRUPT
PAGES = [640, 96, 5000]
KEYS = tuple(BlockKey(bytes([number]) * 5) for number in range(8))
KEY = TierKey(bytes(32))
SHARD = Shard("print/one", 1, 2)


class Rig:
    """A mover with twelve host slots in chunks of five."""

    def __init__(
        self, verify: str = "off", key: TierKey | None = None, store: FakeStore | None = None
    ) -> None:
        self.device = FakeDevice(4, PAGES)
        memory = MmapAllocator(ManualExecutor(held=False))
        self.arena = Arena(self.device.layout, 12, memory, chunk_bytes=5 * self.device.layout.slot_bytes)
        asyncio.run(self.arena.prepare())
        self.store, self.clock = store or FakeStore(), FakeClock()
        self.executor = ManualExecutor()
        self.checksums = make_checksums(verify, self.arena, executor=ManualExecutor(held=False))
        calls = remote_calls(lambda: self.store, self.executor, self.clock.monotonic, 2.0)
        mover = RemoteMover(1, 2, self.arena, self.checksums, key)
        self.copies = TierJobs(calls, mover, self.device.layout.slot_bytes, self.clock.monotonic)
        self.take()
        assert calls.works
        self._jobs = 0

    def take(self) -> tuple[JobReport, ...]:
        first = self.report().jobs
        self.executor.run_all()
        return first + self.report().jobs

    def report(self) -> TierReport:
        report = self.copies.take()
        assert report is not None
        return report

    def copy(self, way: Direction, slots: list[int], keys: tuple[BlockKey, ...]) -> JobReport:
        self._jobs += 1
        places = tuple(map(SlotId, slots))
        self.copies.submit([CopyJob(JobId(self._jobs), way, Tier.REMOTE, places, keys, "print/one")])
        [report] = self.take()
        return report

    def fill(self, slot: int) -> bytes:
        for region, size in enumerate(PAGES):
            self.arena.pages(slot)[region][:] = Random(slot * 10 + region).randbytes(size)
        if self.checksums is not None:
            self.checksums.take(slot)
        return self.slot(slot)

    def slot(self, slot: int) -> bytes:
        return b"".join(self.arena.pages(slot))


def test_put_blocks_are_fetched_into_other_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_BLOCKS", 3)
    rig = Rig()
    were = [rig.fill(slot) for slot in (0, 3, 4, 5)]
    put = rig.copy(Direction.STORE, [0, 3, 4, 5], KEYS[:4])
    assert (put.outcome, put.missing, put.copied_bytes) == (DONE, (), 4 * sum(PAGES))
    got = rig.copy(Direction.LOAD, [11, 6, 2, 1], KEYS[:4])
    assert (got.outcome, got.missing, got.corrupt) == (DONE, (), ())
    assert [rig.slot(slot) for slot in (11, 6, 2, 1)] == were
    assert rig.store.calls.count("put") == rig.store.calls.count("get") == 2


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a key"])
@pytest.mark.parametrize("harm", ["flip", "cut", "swap", "trailer"])
def test_r17_wrong_bytes_never_reach_a_host_slot(harm: str, key: TierKey | None) -> None:
    rig = Rig(key=key)
    for slot in range(3):
        rig.fill(slot)
    rig.copy(Direction.STORE, [0, 1, 2], KEYS[:3])
    first, second = SHARD.name(KEYS[0]), SHARD.name(KEYS[1])
    value = rig.store.values[second]
    rig.store.values[second] = {
        "flip": value[:77] + bytes([value[77] ^ 1]) + value[78:],
        "cut": value[:-100],
        "swap": rig.store.values[first],
        "trailer": value[:-1] + bytes([value[-1] ^ 1]),
    }[harm]
    before = rig.slot(7)
    report = rig.copy(Direction.LOAD, [6, 7, 8], KEYS[:3])
    assert (report.outcome, report.corrupt, report.missing) == (DONE, (1,), ())
    assert rig.slot(7) == before
    assert (rig.slot(6), rig.slot(8)) == (rig.slot(0), rig.slot(2))
    alone = rig.copy(Direction.LOAD, [9], KEYS[1:2])
    assert (alone.outcome, alone.corrupt) == (CORRUPT, (0,))


@pytest.mark.parametrize("verify", ["off", "full"])
def test_r17_a_put_cancelled_before_it_read_its_slots_writes_nothing(
    verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, ended = Rig(verify), list[JobReport]()
    rig.fill(0)

    def hang(_: memoryview) -> None:
        rig.clock.jump(2.0)
        ended.extend(rig.report().jobs)

    monkeypatch.setattr(rig.store, "register", hang)
    rig.copies.submit([CopyJob(JobId(1), Direction.STORE, Tier.REMOTE, (SlotId(0),), KEYS[:1], "print/one")])
    rig.executor.run_all()
    assert [report.outcome for report in ended] == [FAILED]
    assert rig.store.values == {}


@pytest.mark.parametrize("way", Direction)
def test_host_memory_stays_until_the_copies_that_read_or_write_it_have_ended(
    way: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, found = Rig("full"), list[bytes]()
    assert rig.checksums is not None
    kept = rig.fill(0)
    rig.copy(Direction.STORE, [0], KEYS[:1])
    name, slot = ("changed", 0) if way is Direction.STORE else ("take", 1)
    real = getattr(rig.checksums, name)

    def close(slots: list[int] | int) -> object:
        rig.arena.close()
        found.append(rig.slot(slot))
        return real(slots)

    monkeypatch.setattr(rig.checksums, name, close)
    rig.copy(way, [slot], KEYS[:1])
    assert found == [kept]
    assert rig.arena.ready_slots == 0
    late = rig.copy(Direction.STORE, [0], KEYS[1:2])
    assert late.outcome is FAILED
    rig.copy(Direction.LOAD, [1], KEYS[:1])
    assert len(found) == 1


def test_a_cancelled_fetch_changes_no_hints() -> None:
    rig = Rig()
    rig.fill(0)
    rig.copy(Direction.STORE, [0], KEYS[:1])
    rig.copies.submit([CopyJob(JobId(9), Direction.LOAD, Tier.REMOTE, (SlotId(1),), KEYS[:1], "print/one")])
    rig.copies.cancel([JobId(9)])
    rig.store.calls.clear()
    [report] = rig.take()
    assert (report.outcome, report.missing, rig.store.calls) == (FAILED, (), [])


def test_missing_blocks_are_named_and_the_others_are_fetched() -> None:
    rig = Rig()
    rig.fill(0)
    rig.copy(Direction.STORE, [0], KEYS[:1])
    report = rig.copy(Direction.LOAD, [1, 2], (KEYS[5], KEYS[0]))
    assert (report.outcome, report.missing) == (DONE, (0,))
    assert rig.slot(2) == rig.slot(0)
    nothing = rig.copy(Direction.LOAD, [1], KEYS[5:6])
    assert (nothing.outcome, nothing.missing) == (FAILED, (0,))


def test_a_full_store_refuses_blocks_which_is_logged() -> None:
    rig = Rig()
    rig.store.is_full = True
    report = rig.copy(Direction.STORE, [0, 1], KEYS[:2])
    assert (report.outcome, report.missing) == (FAILED, (0, 1))
    assert rig.report().works
    assert rig.copies.calls.faults[RemoteFault.FULL] == 1


def test_a_store_that_fails_fails_the_job() -> None:
    rig = Rig()
    rig.store.fails = True
    for way in (Direction.STORE, Direction.LOAD, Direction.LOAD):
        report = rig.copy(way, [0, 1], KEYS[:2])
        assert (report.outcome, report.missing) == (FAILED, (0, 1))
    assert not rig.report().works


def test_a_new_connection_registers_the_memory_again() -> None:
    rig = Rig()
    rig.fill(0)
    rig.copy(Direction.STORE, [0], KEYS[:1])
    values, rig.store.is_gone = rig.store.values, True
    assert rig.copy(Direction.LOAD, [1], KEYS[:1]).outcome is FAILED
    rig.store = FakeStore()
    rig.store.values = values
    rig.clock.jump(1.0)
    rig.take()
    for _ in range(2):
        assert rig.copy(Direction.LOAD, [2], KEYS[:1]).outcome is DONE
    assert rig.slot(2) == rig.slot(0)
    assert rig.store.registered == 1


def test_a_corrupt_host_slot_is_not_written() -> None:
    rig = Rig("full")
    rig.fill(0)
    rig.fill(1)
    rig.arena.pages(1)[0][3] ^= 1
    report = rig.copy(Direction.STORE, [0, 1], KEYS[:2])
    assert (report.outcome, report.corrupt) == (CORRUPT, (1,))
    assert list(rig.store.values) == [SHARD.name(KEYS[0])]


def test_a_slot_that_a_fetch_has_filled_has_a_checksum() -> None:
    rig = Rig("full")
    rig.fill(0)
    rig.copy(Direction.STORE, [0], KEYS[:1])
    rig.copy(Direction.LOAD, [5], KEYS[:1])
    assert rig.checksums is not None
    assert not rig.checksums.changed([5])


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_r17_with_a_tier_key_a_value_forged_with_its_checksum_is_not_used(
    key: TierKey | None,
) -> None:
    rig, name = Rig(key=key), SHARD.name(KEYS[0])
    rig.fill(0)
    rig.copy(Direction.STORE, [0], KEYS[:1])
    assert rig.copy(Direction.LOAD, [1], KEYS[:1]).outcome is DONE
    assert rig.slot(1) == rig.slot(0)
    forged = bytearray(Random(7).randbytes(sum(PAGES)) + bytes(TRAILER_BYTES))
    seal(memoryview(forged), name, digest_of(rig.arena.layout))
    rig.store.values[name] = bytes(forged)
    before = rig.slot(2)
    report = rig.copy(Direction.LOAD, [2], KEYS[:1])
    assert report.outcome is (DONE if key is None else CORRUPT)
    assert rig.slot(2) == (before if key is not None else bytes(forged[:-TRAILER_BYTES]))


@pytest.mark.parametrize("other", [None, TierKey(b"x" * 32)], ids=["no key", "another key"])
def test_r17_engines_with_different_tier_keys_use_none_of_each_others_values(
    other: TierKey | None,
) -> None:
    with_key = Rig(key=KEY)
    without = Rig(key=other, store=with_key.store)
    for writer, reader, key in ((with_key, without, KEYS[:1]), (without, with_key, KEYS[1:2])):
        writer.fill(0)
        assert writer.copy(Direction.STORE, [0], key).outcome is DONE
        assert writer.copy(Direction.LOAD, [1], key).outcome is DONE
        assert reader.copy(Direction.LOAD, [1], key).outcome is CORRUPT


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
@pytest.mark.parametrize("call", ["seal", "is_whole"])
def test_r17_with_a_tier_key_later_writes_to_the_stores_memory_are_not_used(
    key: TierKey | None, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, memory, real = Rig(key=key), list[memoryview](), getattr(remote, call)
    monkeypatch.setattr(rig.store, "register", memory.append)

    def other_writes(*arguments: object) -> object:
        forged = b"forged by another machine"
        if call == "seal":
            memory[0][: len(forged)] = forged
        answer = real(*arguments)
        if call == "is_whole":
            memory[0][: len(forged)] = forged
        return answer

    monkeypatch.setattr(remote, call, other_writes)
    was = rig.fill(0)
    rig.copy(Direction.STORE, [0], KEYS[:1])
    assert rig.copy(Direction.LOAD, [1], KEYS[:1]).outcome is DONE
    assert (rig.slot(1) == was) is (key is not None)
