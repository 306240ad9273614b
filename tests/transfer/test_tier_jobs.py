"""Tests what jobs promise on every lower tier: a disk through buffers, a disk in place, and a remote tier."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import pytest

from kvoffload.disk.tier_key import TierKey
from kvoffload.model.wire import Direction
from tests.transfer.rig import CORRUPT, DONE, FAILED
from tests.transfer.tier_rig import LOAD, LONG_PAGES, PAGES, STORE, DiskRig, RemoteRig

TIERS = ["disk", "disk in place", "remote"]
KEY = TierKey(bytes(32))

Make: TypeAlias = Callable[..., DiskRig | RemoteRig]


@pytest.fixture(params=TIERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return a function that builds a rig with one kind of tier."""

    def rig(**options: Any) -> DiskRig | RemoteRig:  # noqa: ANN401
        if request.param == "remote":
            return RemoteRig(**options)
        return DiskRig(tmp_path, pages=PAGES if request.param == "disk" else LONG_PAGES, **options)

    return rig


def test_put_blocks_are_fetched_into_other_slots(make: Make) -> None:
    rig, places = make(), [7, 0, 3, 1]
    were = [rig.fill(slot) for slot in (0, 4, 5, 11)]
    put = rig.copy(STORE, [0, 4, 5, 11], places)
    got = rig.copy(LOAD, [1, 2, 6, 10], places)
    for report in (put, got):
        assert (report.outcome, report.copied_bytes) == (DONE, sum(map(len, were)))
        assert (report.corrupt, report.missing, report.stuck) == ((), (), ())
    assert [rig.slot(slot) for slot in (1, 2, 6, 10)] == were


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
@pytest.mark.parametrize(
    ("make", "harm"),
    [
        *((tier, harm) for tier in TIERS for harm in ("flip", "swap")),
        ("remote", "cut"),
        ("remote", "empty"),
        ("remote", "trailer"),
    ],
    indirect=["make"],
)
def test_r17_wrong_bytes_are_reported_as_corrupt_and_do_not_affect_other_blocks(
    make: Make, harm: str, key: TierKey | None
) -> None:
    rig = make(key=key)
    were = [rig.fill(slot) for slot in range(3)]
    rig.copy(STORE, [0, 1, 2], [0, 1, 2])
    rig.harm(1, harm)
    before = rig.slot(7)
    report = rig.copy(LOAD, [6, 7, 8], [0, 1, 2])
    assert report.corrupt == (1,)
    assert report.outcome is (CORRUPT if isinstance(rig, DiskRig) else DONE)
    assert (rig.slot(6), rig.slot(8)) == (were[0], were[2])
    assert rig.slot(7) == before or rig.is_in_place
    alone = rig.copy(LOAD, [9], [1])
    assert (alone.outcome, alone.corrupt, alone.copied_bytes) == (CORRUPT, (0,), 0)


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_r17_with_a_tier_key_a_block_forged_with_its_checksum_is_not_used(
    make: Make, key: TierKey | None
) -> None:
    rig = make(key=key)
    was = rig.fill(0)
    rig.copy(STORE, [0], [0])
    assert rig.copy(LOAD, [1], [0]).outcome is DONE
    assert rig.slot(1) == was
    forged, before = Random(7).randbytes(rig.layout.slot_bytes), rig.slot(2)
    rig.forge(0, forged)
    assert rig.copy(LOAD, [2], [0]).outcome is (DONE if key is None else CORRUPT)
    assert rig.slot(2) == (forged if key is None or rig.is_in_place else before)


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_r17_a_host_slot_that_changed_since_its_store_is_not_written(make: Make, verify: str) -> None:
    rig = make(verify=verify)
    for slot in range(3):
        rig.fill(slot)
    for page in rig.arena.pages(1):
        page[:] = bytes(len(page))
    report = rig.copy(STORE, [0, 1, 2], [4, 5, 6])
    assert (report.outcome, report.corrupt, report.sums) == (CORRUPT, (1,), ())
    alone = rig.copy(STORE, [1], [7])
    assert (alone.outcome, alone.corrupt) == (CORRUPT, (0,))
    assert [rig.has(place) for place in (4, 5, 6, 7)] == [True, False, True, False]


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_later_reads_are_compared_with_the_fetched_checksum(make: Make, verify: str) -> None:
    rig = make(verify=verify)
    assert rig.checksums is not None
    rig.fill(0)
    rig.copy(STORE, [0], [0])
    assert rig.copy(LOAD, [1], [0]).outcome is DONE
    assert not rig.checksums.changed([1])


def test_a_cancelled_fetch_starts_no_more_reads(make: Make) -> None:
    rig, reads = make(), list[object]()
    was = rig.fill(0)
    rig.copy(STORE, [0, 1], [0, 1])
    running, cancelled, other = (rig.start(LOAD, [2 + place], [place]) for place in (0, 1, 0))

    def cancel(*arguments: object) -> None:
        reads.append(arguments)
        rig.copies.cancel((running, cancelled))

    rig.before_each(LOAD, cancel)
    reports = rig.ended()
    outcomes = [reports[job].outcome for job in (running, cancelled, other)]
    assert outcomes == [DONE, FAILED, DONE]
    assert reports[cancelled].missing == ()  # the tier may have the block
    assert len(reads) == 2
    assert rig.slot(2) == was


@pytest.mark.parametrize("way", Direction)
def test_a_failed_call_fails_only_its_job(make: Make, way: Direction) -> None:
    rig, errors = make(), [OSError(errno.EIO, "the test says so")]
    rig.copy(STORE, [0], [0])

    def fail(*_: object) -> None:
        if errors:
            raise errors.pop()

    rig.before_each(way, fail)
    report = rig.copy(way, [0], [0])
    assert (report.outcome, report.copied_bytes, report.sums, report.stuck) == (FAILED, 0, (), ())
    assert report.missing == (() if isinstance(rig, DiskRig) else (0,))
    assert rig.copy(way, [0], [0]).outcome is DONE


@pytest.mark.parametrize("way", Direction)
def test_host_memory_stays_until_the_copies_that_read_or_write_it_have_ended(
    make: Make, way: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, found = make(verify="full"), list[bytes]()
    assert rig.checksums is not None
    kept = rig.fill(0)
    rig.copy(STORE, [0], [0])
    name, slot = ("changed", 0) if way is STORE else ("take", 1)
    real = getattr(rig.checksums, name)

    def close(*slots: Any) -> object:  # noqa: ANN401
        rig.arena.close()
        found.append(rig.slot(slot))
        return real(*slots)

    monkeypatch.setattr(rig.checksums, name, close)
    rig.copy(way, [slot], [0])
    assert found == [kept]
    assert rig.arena.ready_slots == 0
    assert [rig.copy(late, [0], [0]).outcome for late in Direction] == [FAILED, FAILED]
    assert len(found) == 1


def test_a_jobs_copy_time_is_from_its_first_call_to_its_last(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path)
    rig.before_each(STORE, lambda *_: rig.clock.jump(0.5))
    job = rig.start(STORE, [0, 1], [0, 2])
    rig.clock.jump(3.0)
    rig._manual.run_all()
    rig.clock.jump(0.25)
    report = rig.reports()[job]
    assert (report.copy_s, report.queue_s) == (1.0, 3.25)
