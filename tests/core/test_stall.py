from __future__ import annotations

import pytest

from kvoffload.model.causes import MissCause, StoreOutcome
from kvoffload.model.events import CopiesResumed, CopiesStalled
from kvoffload.model.ids import JobId
from kvoffload.model.wire import Direction
from tests.core.world import DONE, FAILED, TEXT, Req, World, cached

BLOCK = 4


def stores(world: World, name: str, blocks: int) -> tuple[Req, JobId]:
    before = set(world.open_jobs())
    request = world.add(name, name * blocks * BLOCK)
    assert world.admit(request) == 0
    while request.computed < blocks * BLOCK:
        world.step(request, tokens=blocks * BLOCK)
    world.idle_step()
    world.step(request, tokens=1)
    (job,) = set(world.open_jobs()) - before
    return request, job


def hangs(world: World, name: str, blocks: int = 1) -> JobId:
    request, job = stores(world, name, blocks)
    world.end(request)
    world.overdue(job)
    return job


def is_stalled(world: World) -> bool:
    """Run an idle step; return whether new copies are stalled."""
    world.idle_step()
    stalls, resumes = len(world.reported(CopiesStalled)), len(world.reported(CopiesResumed))
    assert stalls - resumes in (0, 1)
    return stalls > resumes


def test_three_overdue_jobs_in_a_row_stall_copies_until_one_ends() -> None:
    world = World(device=400, step_tokens=64)
    jobs = [hangs(world, name) for name in "ab"]
    assert not is_stalled(world)
    jobs.append(hangs(world, "c"))
    assert world.reported(CopiesStalled) == [CopiesStalled(3, 50, 3)]
    world.computed("d", "d" * 9)
    assert world.submitted() == []
    world.finish(jobs[1])
    assert world.reported(CopiesResumed) == [CopiesResumed(2)]
    world.copy_all()
    assert world.stores() == {StoreOutcome.ABANDONED: 3, StoreOutcome.STORED: 2}


@pytest.mark.parametrize("outcome", [DONE, FAILED])
def test_jobs_that_end_in_time_prevent_a_stall(outcome: object) -> None:
    world = World(device=400, step_tokens=64)
    for name in "abcdefgh":
        hangs(world, name)
        request, job = stores(world, name.upper(), 1)
        world.finish(job, outcome=outcome)  # type: ignore[arg-type]
        world.end(request)
    assert not is_stalled(world)


def test_copies_stall_while_overdue_jobs_lease_more_than_an_eighth_of_the_device() -> None:
    world = World(device=64, host=256, step_tokens=64)  # copies stall at an eighth of the device, 8 blocks
    jobs = []
    for name in "abcd":
        assert not is_stalled(world)
        jobs.append(hangs(world, name, 3))
        if not is_stalled(world):
            request, job = stores(world, name.upper(), 1)
            world.finish(job)
            world.end(request)
        if is_stalled(world):
            break
    assert len(jobs) == 3
    assert world.reported(CopiesStalled) == [CopiesStalled(9, 8, 1)]
    world.finish(jobs[0])
    assert not is_stalled(world)
    world.finish(*jobs[1:])
    assert not world.device.leased


def test_a_single_overdue_job_of_any_size_stalls_no_copies() -> None:
    world = World(device=64, step_tokens=64)
    hangs(world, "a", 12)
    assert not is_stalled(world)
    hangs(world, "b", 1)
    assert is_stalled(world)


def test_requests_are_served_during_a_stall_and_their_misses_name_the_stall() -> None:
    world = cached(device=64, step_tokens=64)
    for name in "xyz":
        hangs(world, name)
    back = world.add("back", TEXT)
    assert world.admit(back) == 0
    assert world.miss() is MissCause.STALLED
    world.run(back)
    world.end(back)
    new = world.computed("new", "0123456789")
    world.end(new)
    assert world.stores()[StoreOutcome.STALLED] == 2
    assert world.next_miss("0123456789") is MissCause.STALLED
    assert not world.core.has_work


def test_a_hit_found_before_the_stall_is_not_loaded() -> None:
    world = cached(device=64, step_tokens=64)
    promised = world.add("promised", TEXT)
    assert world.lookup(promised) == 12
    for name in "xyz":
        hangs(world, name)
    world.allocate(promised, 12)
    assert world.results == [("promised", False)]
    assert world.admit(promised) == 0
    world.run(promised)


def test_a_hanging_load_counts_towards_a_stall() -> None:
    world = cached(device=64, step_tokens=64)
    hangs(world, "x")
    world.loading()
    (job,) = world.open_jobs(Direction.LOAD)
    world.overdue(job)
    hangs(world, "y")
    assert world.reported(CopiesStalled) == [CopiesStalled(5, 8, 3)]
    world.finish(job)
    assert not is_stalled(world)
