"""Checks that a step's cost, in function calls, does not grow with the number of idle requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffload.model import facts
from kvoffload.model.ids import RequestId
from tests.core.world import TEXT, Req, World, full, window
from tests.operations import calls, lines


def crowded(idle: int, policy: str) -> tuple[World, Req]:
    """Return a world with many idle requests in different states, and its only busy request."""
    world = World(full(), window(6, group=1), device=8 * idle + 100, host=4 * idle + 50, policy=policy)
    world.checks_each_fact = False  # these checks cost more with each request
    for number in range(idle):
        request = world.add(f"idle{number}", f"{number:06}xx{number % 7}")
        if number % 4:
            world.admit(request)
    world.step()
    world.step_and_copy()
    busy = world.admitted("busy", TEXT)
    for _ in range(4):
        world.step(busy)
        world.finish()
    return world, busy


def scenes(world: World, busy: Req) -> dict[str, Callable[[], object]]:
    """Return operations that a step may contain, by name, in an order in which they can run."""
    core = world.core

    def tell(fact: facts.Fact) -> None:
        core.handle(fact)
        core.plan()
        core.take_results()
        core.state.tally.take()

    new = Req(RequestId("new"), "brand new text")
    table = tuple(tuple(world.device.hand_out(2)) for _ in world.groups)
    blocks = tuple(tuple(world.device.hand_out(1)) for _ in world.groups)
    return {
        "an empty step": lambda: tell(facts.StepScheduled(100)),
        "a step of one": lambda: tell(
            facts.StepScheduled(101, (facts.Progress(busy.name, busy.computed, blocks, ((), ())),))
        ),
        "a new request": lambda: tell(facts.RequestSeen(new.name, 14, ((), ()))),
        "its lookup": lambda: core.lookup(new.name, 0, may_wait=True),
        "its allocation": lambda: tell(facts.BlocksAllocated(new.name, table, 0, 0)),
        "its preemption": lambda: tell(facts.StepScheduled(102, (), (new.name,))),
        "the end of a request": lambda: tell(facts.RequestEnded(busy.name, busy.computed)),
        "another empty step": lambda: tell(facts.StepScheduled(103)),
        "a question": lambda: core.has_work,
    }


@pytest.mark.parametrize("count", [calls, lines])
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_step_costs_the_same_with_10_and_with_1000_idle_requests(
    policy: str, count: Callable[[Callable[[], object]], int]
) -> None:
    costs = [
        {what: count(act) for what, act in scenes(*crowded(idle, policy)).items()} for idle in (10, 1_000)
    ]
    assert costs[0] == costs[1]
