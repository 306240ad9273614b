"""Checks the cost of each hook on the engine's critical path, with all observers.

The cost is a number of calls, because a hook that makes more calls is slower on every machine. Each limit is a
measured number plus a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.model import facts
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId
from kvoffload.model.wire import NOTHING, Tier
from kvoffload.remote.address import MooncakeAddress, RemotePlace
from kvoffload.telemetry.catalogue import TierState, tier_state
from kvoffload.transfer.ports import Clocks
from tests.operations import calls
from tests.remote.fake_store import FakeStore
from tests.runtime.parts import BLOCK, IDENTITY, RELOAD, Side

RUNNING = 16

MOST_CALLS = {  # for each hook: the limit without a disk tier, and the limit with a disk tier
    "a step in which nothing happens": (16, 17),
    "a step in which 16 requests get a block each": (159, 160),
    "a step that offers a block and plans its store": (99, 100),
    "a request is seen": (21, 30),
    "a lookup that misses": (19, 28),
    "a lookup that hits": (51, 51),
    "an allocation without a load": (25, 25),
    "an allocation with a load": (64, 64),
    "a step that plans a load": (27, 28),
    "a report of a store": (91, 94),
    "a report of a load": (109, 117),
    "a request ends": (27, 27),
}


def running(side: Side, count: int) -> list[str]:
    """Return the names of requests that decode, and whose blocks have all been stored."""
    names = [f"running{number}" for number in range(count)]
    for name in names:
        side.seen(name, name, blocks=1)
        side.side.lookup(RequestId(name), 0)
        side.allocated(name, blocks=2)
        side.pool.names[side.last_table[0]] = BlockKey(name.encode())
    side.done(side.step(*((name, BLOCK) for name in names)))
    side.step()
    return names


def hooks(side: Side) -> dict[str, Callable[[], object]]:
    """Return the hooks of an engine by name, in an order in which they can run."""
    names = running(side, RUNNING)
    side.stored("shared")
    busy = RequestId("busy")
    side.seen(busy, "busy")
    side.side.lookup(busy, 0)
    side.allocated(busy)
    side.name_blocks("busy")
    side.step()
    new, back = RequestId("new"), RequestId("back")
    side.seen(back, "shared")
    plans: list = []

    def allocation(request: RequestId, external: int, first: int) -> Callable[[], object]:
        table = tuple(DeviceBlockId(first + position) for position in range(3))
        return lambda: side.side.allocated(facts.BlocksAllocated(request, (table,), 0, external))

    def step(*confirmed: tuple[str, int], number: int, decode: int = 0) -> Callable[[], object]:
        progress = tuple(
            facts.Progress(RequestId(name), tokens, ((DeviceBlockId(200 + place),),), ((),))
            for place, (name, tokens) in enumerate(confirmed)
        )
        fact = facts.StepScheduled(number, progress, decode_tokens=decode)
        return lambda: plans.append(side.side.step(fact))

    return {
        "a step in which nothing happens": step(number=100),
        "a step in which 16 requests get a block each": step(
            *((name, BLOCK + 1) for name in names), number=101, decode=RUNNING
        ),
        "a step that offers a block and plans its store": step((busy, BLOCK), number=102),
        "a report of a store": lambda: side.done(plans.pop()),
        "a request is seen": lambda: side.seen(new, "new"),
        "a lookup that misses": lambda: side.side.lookup(new, 0),
        "an allocation without a load": allocation(new, 0, 300),
        "a lookup that hits": lambda: side.side.lookup(back, 0),
        "an allocation with a load": allocation(back, RELOAD, 310),
        "a step that plans a load": step(number=103),
        "a report of a load": lambda: side.done(plans.pop()),
        "a request ends": lambda: side.ended(new),
    }


def counted(**settings: Any) -> dict[str, int]:  # noqa: ANN401  # those of a side
    side = Side(**settings)
    found = {what: calls(act) for what, act in hooks(side).items()}
    side.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    counted()  # the first run in a process makes extra calls
    without, with_ = counted(), counted(portal=True, disk=tmp_path_factory.mktemp("disk"))
    return {what: (without[what], with_[what]) for what in without}


@pytest.mark.parametrize("what", MOST_CALLS)
def test_each_hook_stays_within_its_limit_on_calls(what: str, found: dict[str, tuple[int, int]]) -> None:
    most = MOST_CALLS[what]
    assert all(calls <= limit for calls, limit in zip(found[what], most, strict=True)), found


def tracking(requests: int) -> Side:
    """Return a side with this many idle running requests, some of them stored."""
    side = Side()
    for number in range(requests):
        side.seen(f"r{number}", prefix=f"{number % 5}-", blocks=2)
        side.allocated(f"r{number}", blocks=2)
    for _ in range(3):
        side.done(side.step(*((f"r{number}", 2 * BLOCK) for number in range(0, requests, 2))))
    return side


@pytest.mark.slow
def test_a_steps_cost_does_not_depend_on_the_number_of_idle_requests() -> None:
    assert calls(tracking(10).step) == calls(tracking(10_000).step)


def test_a_step_without_a_planned_job_does_not_request_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    side = tracking(3)

    def asked(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(side.side.core, "plan", asked)
    monkeypatch.setattr(side.side.copies, "overdue", asked)
    assert side.step() == NOTHING
    assert side.side.degraded is None


def test_a_step_without_an_answer_does_not_poll_a_store() -> None:
    store = RemotePlace(MooncakeAddress("nowhere", 1), lambda: IDENTITY)
    with patch("kvoffload.runtime.remote_catalog.open_store", lambda *_: FakeStore()):
        plain, shared = Side(portal=True), Side(portal=True, remote=store)
    for side in (plain, shared):
        for number in range(4):  # these steps probe the remote tier, then read its generation
            side.side.lookup(side.seen(f"{number}"), 0)
            side.allocated(f"{number}")
            side.step()
            side.ended(f"{number}")
            side.step()
    assert tier_state(shared.side, Tier.REMOTE) is TierState.OPEN
    without = calls(plain.step)
    assert calls(shared.step) == without
    shared.clock.jump(1)
    assert calls(shared.step) > without  # the tier checks its time limits in each step
    for side in (plain, shared):
        side.close()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each reading of a clock, except the journal's one reading per batch."""
    found: list[str] = []

    def counted(clock: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            found.append("read")
            return clock()

        return read

    monkeypatch.setattr(
        "tests.runtime.parts.Clocks", lambda now, unix, sleep: Clocks(counted(now), unix, sleep)
    )
    return found


def test_a_hook_reads_the_clock_twice(readings: list[str]) -> None:
    side, counts = Side(), dict[str, int]()
    for what, act in hooks(side).items():
        readings.clear()
        act()
        counts[what] = len(readings)
    assert counts == dict.fromkeys(counts, 2)
