"""The parts of a job that ranks with the same bytes share, and their reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import JobId, Rank, SlotId
from kvoffload.model.wire import (
    AnyJob,
    CopyJob,
    Direction,
    JobReport,
    SlotsFile,
    Tier,
    TierStatus,
    TransferReport,
)
from kvoffload.transfer.sharing import SharedJobs

SLOTS = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)
COPIES = [
    (Tier.HOST, Direction.STORE),
    *[(tier, way) for tier in (Tier.DISK, Tier.REMOTE) for way in Direction],
]


def job(tier: Tier, direction: Direction, slots: list[int], targets: list[int]) -> AnyJob:
    is_disk_fetch = tier is Tier.DISK and direction is Direction.LOAD
    extra = tuple((1000 + target, 2000 + target) for target in targets) if is_disk_fetch else ()
    return CopyJob(JobId(7), direction, tier, tuple(map(SlotId, slots)), tuple(targets), extra)


def reported(side: SharedJobs, *reports: JobReport, below: tuple[TierStatus, ...] = ()) -> TransferReport:
    return side.whole(TransferReport(Rank(0), reports, 8, slot_bytes=64, below=below))


def ended(outcome: CopyOutcome = CopyOutcome.DONE, **found: tuple[int, ...]) -> JobReport:
    return JobReport(JobId(7), Direction.STORE, outcome, 64, 0.1, 0.2, **found)


@given(st.sampled_from(COPIES), SLOTS, st.integers(2, 4), st.randoms())
def test_each_block_of_a_job_is_copied_by_one_rank_and_no_two_write_one_place(
    copy: tuple[Tier, Direction], slots: list[int], ranks: int, draws: object
) -> None:
    tier, direction = copy
    targets = [int(100 + slot) for slot in slots]
    whole = job(tier, direction, slots, targets)
    parts = {place: SharedJobs(place, ranks).own([whole]) for place in range(ranks)}
    copied = []
    for place, found in parts.items():
        for part in found:
            is_disk = tier is Tier.DISK
            copied += [
                (slot, target * ranks + place if is_disk else target)
                for slot, target in zip(part.slots, part.targets, strict=True)
            ]
            if part.extra:
                assert part.extra == tuple(
                    (1000 + t * ranks + place, 2000 + t * ranks + place) for t in part.targets
                )
    assert sorted(copied) == sorted(zip(slots, targets, strict=True))


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK, Tier.REMOTE])
def test_a_job_without_an_own_part_is_reported_at_once_as_done(tier: Tier) -> None:
    side = SharedJobs(1, 2)
    assert side.own([job(tier, Direction.STORE, [2, 4], [6, 8])]) == []
    assert side.is_due
    (found,) = reported(side).jobs
    assert (found.job, found.outcome, found.copied_bytes) == (7, CopyOutcome.DONE, 0)
    assert found.sums == ((0, 0) if tier is Tier.DISK else ())
    assert not side.is_due
    assert reported(side).jobs == ()


def test_a_report_about_a_part_names_the_positions_of_the_whole_job() -> None:
    side = SharedJobs(1, 2)
    side.own([job(Tier.DISK, Direction.STORE, [2, 3, 4, 5], [10, 11, 13, 14])])
    (found,) = reported(side, ended(sums=(71, 72), stuck=(1,))).jobs
    assert (found.sums, found.stuck) == ((0, 71, 72, 0), (2,))
    side.own([job(Tier.DISK, Direction.STORE, [2, 3, 4, 5], [10, 11, 13, 14])])
    (found,) = reported(side, ended(CopyOutcome.CORRUPT, corrupt=(0,))).jobs
    assert (found.outcome, found.corrupt, found.sums) == (CopyOutcome.CORRUPT, (1,), ())


@pytest.mark.parametrize(
    ("missing", "corrupt", "outcome"),
    [
        ((0, 1), (), CopyOutcome.DONE),  # the tier may have the blocks of other ranks
        ((), (), CopyOutcome.FAILED),  # the fetch was cancelled
        ((0,), (1,), CopyOutcome.CORRUPT),
    ],
)
def test_a_fetch_fails_only_if_more_than_this_ranks_blocks_are_missing(
    missing: tuple[int, ...], corrupt: tuple[int, ...], outcome: CopyOutcome
) -> None:
    side = SharedJobs(0, 2)
    side.own([job(Tier.REMOTE, Direction.LOAD, [2, 3, 4], [0, 0, 0])])
    was = CopyOutcome.CORRUPT if corrupt else CopyOutcome.FAILED
    (found,) = reported(side, ended(was, missing=missing, corrupt=corrupt)).jobs
    assert found.outcome is outcome
    assert found.missing == tuple([(0, 2)[place] for place in missing])


def test_the_memory_of_ranks_that_share_counts_once_and_their_disk_files_are_one() -> None:
    file = TierStatus(Tier.DISK, True, SlotsFile(b"id", 5))
    host = TierStatus(Tier.HOST, True, SlotsFile(b"id", 5))
    found = [reported(SharedJobs(place, 2), below=(host, file)) for place in range(2)]
    assert [report.slot_bytes for report in found] == [64, 0]
    assert [[status.file.slots for status in report.below if status.file] for report in found] == [
        [5, 10]
    ] * 2
