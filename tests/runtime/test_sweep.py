"""Makes each call inside the core raise once, on a real scheduler side (R12)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from kvoffload.model.causes import CopyOutcome, DegradeCause
from kvoffload.model.wire import Direction
from tests.core.audit import audit_side
from tests.core.world import CORRUPT, FAILED, full, window
from tests.runtime.side_world import TIMEOUT_S, SideWorld
from tests.settings import make_config
from tests.sweep import Place, chosen, places, raising

TEXT = "abcdefghijklm"

WORLDS: dict[str, Callable[[], SideWorld]] = {
    "eager": lambda: SideWorld(full(), window(5, group=1), ranks=2, device=52, host=16),
    "lazy": lambda: SideWorld(
        device=20,
        host=12,
        step_tokens=4,
        config=make_config(store_policy="lazy", transfer_timeout_s=TIMEOUT_S),
    ),
}


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """Drop log lines, because these tests would print hundreds of tracebacks."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def live(world: SideWorld) -> None:
    """Run requests, and cause faults of every kind."""
    fill(world, "first")
    a_shared_load_and_an_abort(world)
    for end in (FAILED, CORRUPT, None):
        copies_that_end_badly(world, end)
    a_reset(world)
    an_eviction(world)
    world.finish_requests()


def fill(world: SideWorld, name: str) -> None:
    """Store TEXT on the host, and remove it from the device.

    The lazy planner stores TEXT only after other requests have taken device blocks.
    """
    world.serve_again(name, TEXT)
    for number in range(4 if world.config.store_policy == "lazy" else 0):
        world.serve_again(f"{name}{number}", f"{number} of {name} fills")
    world.drain()
    world.device.forget_keys()


def a_shared_load_and_an_abort(world: SideWorld) -> None:
    for name in ("loads", "shares", "leaves"):
        world.add(name, TEXT)
    for name in ("loads", "shares", "leaves"):
        world.admit(world.requests[name])
    world.step()
    for name in ("loads", "leaves"):
        world.end(world.requests[name])
    world.add("twin", "one more text")
    world.add("also", "one more text")
    world.turn(copies_end=False)
    world.turn(copies_end=False)
    world.end_copies(world.submitted())
    world.finish_requests()
    world.drain()


def copies_that_end_badly(world: SideWorld, end: CopyOutcome | None) -> None:
    """Let a load and a store fail or hang. Preempt the request that stores, and abort the request that loads."""
    fill(world, f"fills{end}")
    for name in (f"again{end}", f"leaves{end}"):
        world.add(name, TEXT)
    world.add(f"new{end}", f"{end} is at the front")
    for _ in range(3):
        world.turn(copies_end=False)
    if end is None:
        world.hang()
    else:
        for job in world.submitted():
            is_corrupt = end is CORRUPT and world.copies[job].job.direction is Direction.LOAD
            world.report(0, job, CORRUPT if is_corrupt else FAILED, (0,) if is_corrupt else ())
    world.turn(copies_end=False)
    if world.requests[f"new{end}"].state == "running":
        world.preempt(world.requests[f"new{end}"])
    world.end(world.requests[f"leaves{end}"])
    world.finish_requests()
    world.end_copies([*world.hung & world.copies.keys()][:1])  # one hanging copy ends late


def a_reset(world: SideWorld) -> None:
    world.add("old", TEXT)
    for _ in range(2):
        world.turn(copies_end=False)
    world.reset()
    world.finish_requests()
    world.serve_again("new", TEXT)


def an_eviction(world: SideWorld) -> None:
    world.add("stays", "stays here" * 2)
    for number in range(3):
        world.serve_again(f"other{number}", f"{number} is another prompt")
    world.device.forget_keys()
    world.serve_again("back", "1 is another prompt")
    world.side.gauges()
    world.side.audit()


def trial(make: Callable[[], SideWorld], place: Place) -> list[str]:
    """Return the problems found after the core has raised at this place."""
    world = make()
    try:
        with raising(place):
            live(world)
        problems = world.problems_at_end()
        world.serve_again("last", "a new prompt")
        problems += world.problems_at_end()
    except Exception as error:
        return [repr(error)]
    if world.side.degraded is not DegradeCause.HANDLER_RAISED:
        problems.append("offloading is on")
    if not any(str(place) in line for line in world.side.audit()):
        problems.append(f"the audit says {world.side.audit()}")
    return problems


@pytest.mark.parametrize("name", WORLDS)
def test_without_an_injected_fault_nothing_goes_wrong(name: str) -> None:
    world = WORLDS[name]()
    live(world)
    assert world.problems_at_end() == []
    assert audit_side(world.side) == []
    assert world.side.degraded is None


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_r12_wherever_the_core_raises_loads_are_answered_once_and_nothing_is_leased(name: str) -> None:
    make = WORLDS[name]
    world = make()
    found = places(lambda: live(world))
    assert len(found) > 150
    tried = {place: trial(make, place) for place in chosen(found, every=11)}
    wrong = {str(place): problems for place, problems in tried.items() if problems}
    assert not wrong, f"{len(wrong)} of {len(tried)} places: {wrong}"
