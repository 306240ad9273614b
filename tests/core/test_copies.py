from __future__ import annotations

import copy

import pytest

from tests.core.fingerprint import fingerprint
from tests.core.world import FAILED, World, full, window

TEXT = "abcdefghijklm"


def busy(policy: str = "eager") -> World:
    """Return a world after a reset. It has a load, stores, a pending hit, and an offer that waits for a slot."""
    world = World(full(), window(5, group=1), ranks=2, device=48, host=16, policy=policy)
    world.reset()
    world.only_on_host(TEXT)
    world.admit(world.add("loads", TEXT))
    world.step()
    world.lookup(world.add("asks", TEXT), may_wait=False)
    stores = world.admitted("stores", "0123456789")
    world.step(stores)
    world.step(stores)
    return world


def play(world: World) -> list[object]:
    """End all jobs and requests of a world; return everything observed on the way."""
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
def test_a_copied_world_is_equal_and_behaves_the_same(policy: str) -> None:
    world = busy(policy)
    before = fingerprint(world.core)
    assert before == fingerprint(busy(policy).core)
    duplicate = copy.deepcopy(world)
    assert fingerprint(duplicate.core) == before
    seen = play(duplicate)
    assert fingerprint(world.core) == before != fingerprint(duplicate.core)
    assert play(world) == seen
