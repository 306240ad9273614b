"""An engine may report a request's progress some steps late, but must report new blocks at once."""

from __future__ import annotations

from tests.core.world import Req, World


def decoding(world: World, names: str) -> list[Req]:
    """Return requests with computed prompts. Each prompt is one token longer than the previous prompt."""
    requests = []
    for number, name in enumerate(names):
        request = world.computed(name, name * (5 + number))
        requests.append(request)
    for _ in range(4):
        world.idle_step()
    world.drain()
    return requests


def test_blocks_of_a_few_steps_share_a_job() -> None:
    world = World(report_every=4)
    requests = decoding(world, "abcd")
    world.until_report = 4
    for request in requests:
        request.text += "zyxwvutsr"
    plans = [world.step(tokens=1) for _ in range(12)]
    assert [len(plan.stores) for plan in plans] == [0, 0, 0, 1] * 3
    world.drain()
    assert [world.on_host(request.text[:12]) for request in requests] == ["xxx"] * 4


def test_unreported_blocks_are_stored_at_the_end_of_their_request() -> None:
    world = World(report_every=100, step_tokens=1)
    request = world.computed("a", "abcdefghijklmnopq")
    assert world.open_jobs() == []
    world.end_and_drain(request)
    assert world.on_host("abcdefghijklmnop") == "xxxx"


def test_a_preemption_loses_unreported_blocks() -> None:
    world = World(report_every=100, step_tokens=1)
    request = world.computed("a", "abcde")
    world.preempt_and_step(request)
    assert world.stores() == {}
