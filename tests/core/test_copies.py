"""The core can be copied and compared. The exploration and the comparison of two runs rely on this."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from kvoffload.core.machine import SlotState
from kvoffload.core.request import RequestRecord
from kvoffload.model.ids import RequestId
from tests.core.fingerprint import fingerprint
from tests.core.world import FAILED, World, full, window

TEXT = "abcdefghijklm"


def busy(policy: str = "eager") -> World:
    """Return a world with a load, stores, a pending hit and an offer waiting for a slot, after a reset."""
    world = World(full(), window(5, group=1), ranks=2, device=48, host=16, policy=policy)
    world.reset()
    world.serve("first", TEXT)
    world.device.forget_keys()
    world.admit(world.add("loads", TEXT))
    world.step()
    world.lookup(world.add("asks", TEXT), may_wait=False)
    stores = world.add("stores", "0123456789")
    world.admit(stores)
    world.step(stores)
    world.step(stores)
    return world


def play(world: World) -> list[object]:
    """Play the same actions on a world and on its copy; return everything observed in both."""
    seen: list[object] = []
    for job in sorted(world.copies):
        world.report(1, job, FAILED)
        world.report(0, job)
        seen.append(fingerprint(world.core))
    for name in sorted(world.requests):
        request = world.requests[name]
        if request.state == "waiting":
            seen.append(world.admit(request))
    for _ in range(3):
        seen.append(world.step())
        world.finish()
    for name in sorted(world.requests):
        world.end(world.requests[name])
    world.drain()
    return [*seen, world.results, world.log, fingerprint(world.core)]


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_copy_is_equal_and_behaves_the_same(policy: str) -> None:
    world = busy(policy)
    duplicate = copy.deepcopy(world)
    assert fingerprint(duplicate.core) == fingerprint(world.core)
    assert hash(fingerprint(duplicate.core)) == hash(fingerprint(world.core))
    assert play(duplicate) == play(world)


def test_what_happens_to_a_copy_does_not_happen_to_the_original() -> None:
    world = busy()
    before = fingerprint(world.core)
    duplicate = copy.deepcopy(world)
    play(duplicate)
    assert fingerprint(world.core) == before
    assert fingerprint(duplicate.core) != before
    world.check()


def test_the_same_facts_give_the_same_fingerprint() -> None:
    assert fingerprint(busy().core) == fingerprint(busy().core)


CHANGES: dict[str, Callable[[World], object]] = {
    "a request": lambda world: world.add("b", "xyz"),
    "a key of a request": lambda world: world.add("b", "wxyz"),
    "a lookup": lambda world: world.lookup(world.requests["waits"]),
    "an allocation": lambda world: world.admit(world.requests["waits"]),
    "confirmed tokens": lambda world: world.step(),
    "the end of a request": lambda world: world.end(world.requests["runs"]),
    "one rank's report": lambda world: world.report(0, 0),  # type: ignore[arg-type]
    "another rank's report": lambda world: world.report(1, 0),  # type: ignore[arg-type]
    "a failed copy": lambda world: world.report(0, 0, FAILED),  # type: ignore[arg-type]
    "a copy abandoned": lambda world: world.overdue(0),  # type: ignore[arg-type]
    "a reset": lambda world: world.reset(),
    "a broken invariant": lambda world: world.degrade(),
    "more slots": lambda world: world.ready_up_to(99),
    "a block allocated": lambda world: world.core.state.tables.reallocated(world.requests["runs"].tables[1]),
    "a use of a slot": lambda world: world.core.state.pool.use(
        [max(world.core.state.pool.index.values())], {}
    ),
}


def test_every_kind_of_change_shows_and_no_two_look_the_same() -> None:
    pictures = {"nothing": fingerprint(scene().core)}
    for what, change in CHANGES.items():
        world = scene()
        change(world)
        pictures[what] = fingerprint(world.core)
    assert len(set(pictures.values())) == len(pictures)


def scene() -> World:
    world = World(full(), window(5, group=1), ranks=2)
    world.add("runs", "0123456789abc")
    world.admit(world.requests["runs"])
    world.step()
    world.step()
    other = world.add("other", TEXT)
    world.admit(other)
    world.step(other)
    world.step(other)
    world.end(other)
    world.idle_step()
    world.finish(*[job for job in world.open_jobs() if job != 0])
    world.add("waits", TEXT)
    assert world.count(SlotState.READY) > 1
    assert 0 in world.copies
    return world


# -- the picture itself -----------------------------------------------------------------------------------------


def test_records_in_a_set_stand_in_the_order_of_their_names() -> None:
    c, a, d, b = (RequestRecord(RequestId(name), 1, ([],)) for name in "cadb")
    assert fingerprint({c, a, d, b}) == fingerprint([a, b, c, d])
