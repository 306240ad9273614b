"""The calls that a remote tier adds to the hooks if it has nothing to report, and if it does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvoffload.model.ids import RequestId
from kvoffload.model.wire import Tier
from kvoffload.remote.address import MooncakeAddress, RemotePlace
from kvoffload.telemetry.catalogue import TierState, tier_state
from tests.operations import calls
from tests.remote.fake_store import FakeStore
from tests.runtime.parts import Side

StartSide = Callable[[FakeStore | None], Side]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartSide]:
    sides: list[Side] = []

    def begin(store: FakeStore | None) -> Side:
        monkeypatch.setattr("kvoffload.runtime.remote_catalog.open_store", lambda *_: store)
        place = None if store is None else RemotePlace(MooncakeAddress("nowhere", 1), lambda: "print")
        side = Side(portal=True, remote=place)
        sides.append(side)
        for number in range(
            4
        ):  # The store is probed, then its generation is read. The first run of the process makes more calls.
            begin_and_end(side, f"warm {number}")
        return side

    yield begin
    for side in sides:
        side.close()


def begin_and_end(side: Side, name: str) -> dict[str, int]:
    """Look up and end a request that computes nothing; return the calls of each hook."""
    counted = {
        "seen": calls(lambda: side.seen(name, name)),
        "lookup": calls(lambda: side.side.lookup(RequestId(name), 0)),
        "allocated": calls(lambda: side.allocated(name)),
        "step": calls(side.step),
    }
    side.ended(name)
    side.step()
    return counted


def test_a_step_without_an_answer_does_not_poll_a_store(start: StartSide) -> None:
    plain, shared = start(None), start(FakeStore())
    assert tier_state(shared.side, Tier.REMOTE) is TierState.OPEN
    without = calls(plain.step)
    assert calls(shared.step) == without
    shared.clock.jump(1)
    assert calls(shared.step) > without  # The step checks time limits.


def test_r17_a_dead_store_adds_a_lookup_five_calls_and_a_step_none(start: StartSide) -> None:
    plain, store = start(None), FakeStore()
    shared = start(store)
    store.fails = True
    for number in range(3):
        begin_and_end(shared, f"fails {number}")
    assert tier_state(shared.side, Tier.REMOTE) is TierState.FAILING
    store.calls.clear()
    without, dead = begin_and_end(plain, "new"), begin_and_end(shared, "new")
    assert store.calls == []
    most = {"seen": 6, "lookup": 5, "allocated": 0, "step": 0}
    assert all(dead[hook] - without[hook] <= more for hook, more in most.items()), (without, dead)
