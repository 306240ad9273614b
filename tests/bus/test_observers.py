from __future__ import annotations

import logging

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import Feed, run_observer
from tests.bus.test_feed import numbers

pytestmark = pytest.mark.asyncio


def fed(bus: Bus, name: str, capacity: int) -> Feed[int]:
    """Return a feed that receives every published number."""
    feed: Feed[int] = bus.observe(name, capacity)
    bus.count(int, feed.offer)
    return feed


async def test_an_observer_that_raises_is_removed_and_the_others_continue() -> None:
    bus, seen, removed = Bus(), list[int](), list[tuple[str, str, int]]()
    bad, good = fed(bus, "bad", 10), fed(bus, "good", 10)

    async def fail(event: int) -> None:
        raise RuntimeError(f"at {event}")

    async def watch(event: int) -> None:
        seen.append(event)

    def on_removed(name: str, error: Exception) -> None:
        removed.append((name, str(error), bad.dropped))

    async with anyio.create_task_group() as group:
        group.start_soon(run_observer, bad, fail, on_removed)
        group.start_soon(run_observer, good, watch, on_removed)
        bus.publish(1)
        bus.publish(2)
        await wait_all_tasks_blocked()
        bus.publish(3)
        bus.close()
    assert removed == [("bad", "at 1", 1)]  # the bad observer's second event was queued, and was dropped
    assert seen == [1, 2, 3]
    assert numbers(bad) == (1, 1, 0)


async def test_an_observer_that_waits_loses_only_its_own_events() -> None:
    bus, seen, gate = Bus(), list[int](), anyio.Event()
    slow, quick = fed(bus, "slow", 2), fed(bus, "quick", 2)
    late = list[int]()

    async def wait(event: int) -> None:
        await gate.wait()
        late.append(event)

    async def watch(event: int) -> None:
        seen.append(event)

    async with anyio.create_task_group() as group:
        group.start_soon(run_observer, slow, wait, _fail_if_called)
        group.start_soon(run_observer, quick, watch, _fail_if_called)
        for number in range(6):
            bus.publish(number)
            await wait_all_tasks_blocked()
        gate.set()
        bus.close()
    assert seen == [0, 1, 2, 3, 4, 5]
    assert late == [0, 1, 2]  # the observer had taken one event, and two were queued
    assert slow.dropped == 3
    assert quick.dropped == 0


async def test_a_cancelled_observer_leaves_no_feed_open() -> None:
    bus = Bus()
    feed = fed(bus, "watcher", 10)

    async def watch(event: int) -> None:
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(run_observer, feed, watch, _fail_if_called)
        bus.publish(1)
        bus.publish(2)
        await wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert numbers(feed) == (1, 1, 0)
    assert not feed.offer(3)


async def test_a_raising_callback_does_not_end_the_other_observers(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus()
    feed = fed(bus, "watcher", 10)

    async def fail(event: int) -> None:
        raise RuntimeError

    bus.publish(1)
    with caplog.at_level(logging.ERROR):
        await run_observer(feed, fail, _fail_if_called)
    assert [record.getMessage() for record in caplog.records] == ["callback_failed"]


def _fail_if_called(name: str, error: Exception) -> None:
    raise AssertionError(f"{name} was removed: {error!r}")
