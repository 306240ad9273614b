from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from kvoffload.core.tiers import DiskTier
from kvoffload.disk.folder import lock_folder, make_folder
from kvoffload.disk.index import IndexHeader, encode_header, load_index
from kvoffload.disk.open_folder import LOCK_PAUSE_S, LOCK_TRIES, open_folder
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.config import AUTO
from kvoffload.model.ids import RequestId
from kvoffload.model.wire import Direction, JobReport, TransferPlan
from kvoffload.runtime import disk_catalog
from tests.captured_logs import capture_logs
from tests.core import below
from tests.runtime.parts import BLOCK, IDENTITY, RELOAD, TIMEOUT_S, Side, loading, measure_prefill, storing

LOAD, STORE = Direction.LOAD, Direction.STORE

Start = Callable[..., Side]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that closes the previous side and starts one on the same folder. Its index has been read."""
    with ExitStack() as running:

        def begin(between: Callable[[], object] | None = None, disk_drain_s: float = 3.0) -> Side:
            running.close()
            if between is not None:
                between()
            made = Side(portal=True, disk=tmp_path, min_load_tokens=AUTO, disk_drain_s=disk_drain_s)
            running.callback(made.close)
            made.step()
            made.step()
            return made

        yield begin


@pytest.fixture
def side(start: Start) -> Side:
    return start()


def disk_of(side: Side) -> DiskTier:
    return below.disk_of(side.side.state)


def end_disk_jobs(
    side: Side, plan: TransferPlan, copy_s: float = 0.0, outcome: CopyOutcome = CopyOutcome.DONE
) -> None:
    for job in plan.below:
        sums = (7,) * len(job.slots) if job.direction is STORE else ()
        side.report(JobReport(job.id, job.direction, outcome, 64, 0.0, copy_s, sums=sums))


def spilling(side: Side, prefix: str) -> TransferPlan:
    """Serve a prefix twice; return the plan that spills its blocks."""
    side.stored(prefix)
    again = f"again-{prefix}"
    side.side.lookup(side.seen(again, prefix), 0)
    side.allocated(again, RELOAD)
    side.done(side.step())
    side.step((again, RELOAD))
    side.ended(again)
    assert side.side.has_work
    plan = side.step()
    assert [job.direction for job in plan.below] == [STORE]
    return plan


def leave_on_disk(side: Side, prefix: str) -> None:
    """Serve a prefix twice so that its blocks are spilled, and fill the host with other prefixes."""
    end_disk_jobs(side, spilling(side, prefix))
    for number in range(17):
        side.stored(f"{prefix}-filler{number}")


def fetching(side: Side, name: str, prefix: str) -> TransferPlan:
    """Return the plan that fetches a request's prefix from the disk."""
    side.seen(name, prefix)
    plan = side.step()
    assert [job.direction for job in plan.below] == [LOAD]
    return plan


def fetched(side: Side, name: str, prefix: str, seconds: float) -> RequestId:
    """Let a request wait this many seconds for the fetch of its prefix from the disk."""
    plan, request = fetching(side, name, prefix), RequestId(name)
    assert side.side.lookup(request, 0) is None
    side.clock.jump(seconds)
    end_disk_jobs(side, plan, seconds / 2)
    assert side.side.lookup(request, 0) == RELOAD
    return request


def measure(side: Side) -> None:
    """Let the side measure the prefill's speed, and loads that take no time."""
    measure_prefill(side)
    side.done(loading(side))


def least_from_disk(side: Side) -> int:
    """Let one second pass; return the minimum number of tokens for which a fetch starts."""
    side.clock.jump(1.0)
    side.step()
    return disk_of(side).least_tokens


@pytest.mark.parametrize("seconds", [1.0, 0.01])
def test_auto_fetches_only_prompts_that_the_disk_delivers_faster(side: Side, seconds: float) -> None:
    is_faster = seconds < 0.1
    for prefix in "ab":
        leave_on_disk(side, prefix)
    measure(side)
    fetched(side, "first", "a", seconds=seconds)
    assert side.counts.distributions["kvoffload_load_wait_seconds"]["fetch",].total == pytest.approx(seconds)
    assert (0 < least_from_disk(side) <= RELOAD) is is_faster
    if is_faster:
        fetched(side, "also fast", "b", seconds=seconds)
        return
    assert side.side.lookup(side.seen("computes", "b"), 0) == 0
    assert side.step().below == ()
    side.clock.jump(61.0)
    side.step()
    assert side.side.lookup(side.seen("tries again after a minute", "b"), 0) is None


def test_a_failed_fetch_says_nothing_about_the_disks_speed(side: Side) -> None:
    leave_on_disk(side, "a")
    measure(side)
    plan = fetching(side, "fails", "a")
    side.clock.jump(1.0)
    end_disk_jobs(side, plan, 0.5, CopyOutcome.FAILED)
    assert least_from_disk(side) == 0


def test_r16_only_the_end_of_another_copy_gives_a_copy_more_time(side: Side) -> None:
    for prefix in "ab":
        leave_on_disk(side, prefix)
    ends, hangs = (fetching(side, f"again {prefix}", prefix) for prefix in "ab")
    overdue = list[facts.JobOverdue]()
    side.side.bus.count(facts.JobOverdue, overdue.append)
    for act, is_usable in ((partial(end_disk_jobs, side, ends), True), (side.stored, False)):
        side.clock.jump(9 * TIMEOUT_S)
        act()
        side.clock.jump(2 * TIMEOUT_S)
        side.step()
        side.step()
        assert disk_of(side).is_usable is is_usable
    assert [fact.job for fact in overdue] == [job.id for job in hangs.below]
    end_disk_jobs(side, hangs)


def test_recording_index_changes_does_not_wake_the_index_thread(side: Side, tmp_path: Path) -> None:
    side.portal.advance()
    side.portal.index.hold()
    leave_on_disk(side, "a")
    assert side.portal.index.waiting == 0
    side.portal.advance(disk_catalog.WRITE_PERIOD_S)
    assert side.portal.index.waiting == 1
    side.portal.index.release()
    (file,) = tmp_path.glob("**/index")
    contents = load_index(open_folder(file.parent, IDENTITY.fingerprint), 100)
    assert contents is not None
    assert len(contents.entries) == RELOAD // BLOCK


def test_an_invalidation_is_written_at_once(side: Side) -> None:
    leave_on_disk(side, "a")
    side.portal.index.hold()
    (job,) = fetching(side, "again", "a").below
    side.report(JobReport(job.id, LOAD, CopyOutcome.CORRUPT, 0, 0.0, 0.0, corrupt=(1,)))
    assert side.portal.index.waiting == 1
    side.portal.index.release()


def test_an_idle_engine_steps_until_stores_end_and_at_most_the_drain_time_for_the_disk(start: Start) -> None:
    side = start(disk_drain_s=5.0)
    side.clock.jump(10.0)
    assert not side.side.has_work
    spilling(side, "a")
    side.clock.jump(4.9)
    assert side.side.has_work
    side.clock.jump(0.1)
    assert not side.side.has_work

    side.seen("waits", "b")
    assert side.side.has_work, "a step of any request ends the copy on the disk"
    side.ended("waits")
    plan = storing(side)
    side.ended("s")
    side.clock.jump(6.0)
    assert side.side.has_work
    side.done(plan)
    assert not side.side.has_work


@pytest.mark.parametrize("tries", [1, LOCK_TRIES])
def test_a_folder_in_use_is_tried_again_for_a_minute(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, tries: int
) -> None:
    holder = lock_folder(make_folder(tmp_path, IDENTITY, 0))
    side = start()
    disk = disk_of(side)
    for _ in range(tries):
        assert (disk.is_open, disk.is_closed) == (False, False)
        side.portal.advance(LOCK_PAUSE_S)
    holder.close()
    side.portal.advance(LOCK_PAUSE_S)
    side.step()
    side.step()
    is_late = tries == LOCK_TRIES
    assert (disk.is_open, disk.is_closed) == (not is_late, is_late)
    assert caplog.text.count("disk_in_use") == 1
    assert caplog.text.count("disk_closed") == is_late


def test_a_folder_that_all_users_can_rename_causes_one_warning(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    start()
    assert caplog.text.count("disk_not_protected") == 1


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def of_other_files(path: Path) -> None:
    path.write_bytes(encode_header(IndexHeader(bytes(16), (b"another file id.",), 100, path.parents[1].name)))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (emptied, "it is empty, or was erased by a reset"),
        (of_other_files, "it belongs to other slot files, which had 0 blocks"),
    ],
)
def test_an_unusable_index_causes_one_warning_and_the_disk_starts_empty(
    start: Start, tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    side = start()
    leave_on_disk(side, "a")
    (path,) = tmp_path.glob("**/index")
    with capture_logs() as lines:
        side = start(between=partial(spoil, path))
    (dropped,) = [line for line in lines if line["log_level"] == "warning"]
    assert (dropped["event"], dropped["file"], dropped["reason"]) == ("disk_index_dropped", str(path), reason)
    assert disk_of(side).is_open
    side.seen("again", "a")
    assert side.step().below == ()


def test_any_exception_on_the_index_thread_closes_the_tier(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("kvoffload.runtime.disk_catalog.make_folder", fail)
    assert disk_of(start()).is_closed
    assert "RecursionError: too deep" in caplog.text


def test_a_reset_is_complete_although_an_older_block_is_being_written(side: Side) -> None:
    """vLLM resets the connector before it sleeps, when no block is leased, but spills may run."""
    plan = spilling(side, "a")
    assert side.side.reset() is True
    end_disk_jobs(side, plan)
    assert side.side.lookup(side.seen("later", "a"), 0) == 0
    assert not disk_of(side).pool.index
