"""The eager planner lets the few blocks of a decoding batch wait for each other, and nothing else."""

from __future__ import annotations

from kvoffload.model import facts
from kvoffload.model.causes import RejectionCause
from kvoffload.model.causes import StoreOutcome as Outcome
from kvoffload.model.events import FactRejected
from kvoffload.model.transfer import TransferJob
from tests.core.world import Req, World


def decoding(world: World, names: str) -> list[Req]:
    """Requests that have computed their prompt; each is one token further than the one before."""
    requests = []
    for number, name in enumerate(names):
        request = world.add(name, name * (5 + number))
        world.admit(request)
        world.run(request)
        requests.append(request)
    world.drain()
    for _ in range(4):
        world.idle_step()
    return requests


def test_blocks_of_a_few_steps_share_a_job() -> None:
    world = World(merge_steps=4)
    decoding(world, "abcd")
    before = len(world.open_jobs())
    jobs: list[TransferJob] = []
    for _ in range(8):
        jobs += world.step().stores
    assert [len(job.slots) for job in jobs] == [4, 4]  # as many blocks as without, in a quarter of the jobs
    assert len(world.open_jobs()) == before + 2


def test_a_second_block_of_a_request_does_not_wait() -> None:
    world = World(merge_steps=100)
    request = world.add("a", "abcdefghijklmnopqrstuvwxy")
    world.admit(request)
    assert [len(job.slots) for _ in range(4) for job in world.step().stores] == [2, 2, 2]


def test_nothing_waits_while_the_device_is_nearly_full() -> None:
    world = World(merge_steps=100, device=8)  # two steps may hand out 6
    request = world.add("a", "abcdefghi")
    world.admit(request)
    world.run(request)
    assert sum(world.stores().values()) + world.core._stores.leased_blocks == 2


def test_what_waits_is_stored_at_the_end_of_its_request() -> None:
    world = World(merge_steps=100)
    request = world.add("a", "abcde")
    world.admit(request)
    world.run(request)
    assert world.open_jobs() == []
    world.end(request)
    world.drain()
    assert world.on_host("abcd") == "x"


def test_what_waits_is_lost_with_a_preemption_and_counted() -> None:
    world = World(merge_steps=100)
    request = world.add("a", "abcde")
    world.admit(request)
    world.run(request)
    world.preempt(request)
    world.idle_step()
    assert world.stores() == {Outcome.LOST: 1}


def test_progress_of_a_request_without_a_table_is_a_surprise_and_no_more() -> None:
    world = World(merge_steps=100)
    request = world.add("a", "abcde")
    world.tell(facts.StepScheduled(0, (facts.Progress(request.name, 4),)))
    assert [event.cause for event in world.reported(FactRejected)] == [RejectionCause.UNKNOWN_REQUEST]
