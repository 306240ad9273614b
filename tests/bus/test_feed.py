from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import Feed, run_observer

pytestmark = pytest.mark.asyncio


class CountedFeed(Feed[int]):
    wakeups = 0

    def _wake(self) -> None:
        self.wakeups += 1
        super()._wake()


def numbers(feed: Feed[Any]) -> tuple[int, int, int]:
    """Return how many events were taken, how many were dropped, and how many are queued."""
    return feed._taken, feed.dropped, len(feed._waiting)


async def take_all(feed: Feed[int], into: list[int]) -> None:
    while events := await feed.take():
        into += events


async def test_events_arrive_in_order_and_reading_ends_when_closed() -> None:
    feed, taken = Feed[int]("watcher", 10), list[int]()
    async with anyio.create_task_group() as group:
        group.start_soon(take_all, feed, taken)
        feed.offer(1)
        await wait_all_tasks_blocked()
        feed.offer(2)
        feed.offer(3)
        feed.close()
    assert taken == [1, 2, 3]
    assert not feed.offer(4)
    assert numbers(feed) == (3, 0, 0)


async def test_a_full_feed_drops_the_new_event_and_counts_it() -> None:
    feed, taken = Feed[int]("watcher", 2), list[int]()
    assert all(feed.offer(number) for number in range(5))
    assert numbers(feed) == (0, 3, 2)
    assert await feed.take() == [0]
    feed.offer(9)
    feed.close()
    await take_all(feed, taken)
    assert taken == [1, 9]
    assert numbers(feed) == (3, 3, 0)


async def test_no_more_events_are_taken_than_requested() -> None:
    feed = Feed[int]("watcher", 10)
    for number in range(5):
        feed.offer(number)
    feed.close()
    assert [await feed.take(2) for _ in range(4)] == [[0, 1], [2, 3], [4], []]
    assert numbers(feed) == (5, 0, 0)


async def test_a_burst_wakes_a_sleeping_consumer_only_once() -> None:
    feed, taken = CountedFeed("watcher", 1000), list[int]()
    async with anyio.create_task_group() as group:
        group.start_soon(take_all, feed, taken)
        await wait_all_tasks_blocked()
        for number in range(500):
            feed.offer(number)
        await wait_all_tasks_blocked()
        assert (len(taken), feed.wakeups) == (500, 1)
        feed.close()
    assert feed.wakeups == 2  # closing the feed wakes the consumer once more


async def test_an_awake_consumer_is_not_woken() -> None:
    feed = CountedFeed("watcher", 10)
    feed.offer(1)
    assert await feed.take() == [1]
    feed.offer(2)
    assert feed.wakeups == 0


async def test_events_that_a_consumer_never_took_count_as_dropped() -> None:
    feed = Feed[int]("watcher", 10)
    for number in range(3):
        feed.offer(number)
    await feed.take()
    feed.abandon()
    feed.abandon()
    assert not feed.offer(4)
    assert numbers(feed) == (1, 2, 0)


async def test_a_busy_consumer_lets_other_tasks_run() -> None:
    feed, other_ran_at = Feed[int]("watcher", 1000), list[int]()
    for number in range(1000):
        feed.offer(number)

    async def other() -> None:
        other_ran_at.append(numbers(feed)[0])

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        for _ in range(1000):
            await feed.take()
    assert other_ran_at[0] < 100


async def test_cancelling_a_sleeping_consumer_leaves_the_feed_usable() -> None:
    feed = CountedFeed("watcher", 10)
    async with anyio.create_task_group() as group:
        group.start_soon(take_all, feed, [])
        await wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    feed.offer(1)
    assert feed.wakeups == 0  # the cancelled consumer no longer sleeps
    assert await feed.take() == [1]


class Interleaved(deque[int]):
    """A feed's queue that calls a function when the feed checks whether the queue is empty.

    `at` maps a check's number to the function to call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.at: dict[int, Callable[[], object]] = {}

    def __bool__(self) -> bool:
        self.looks += 1
        found = len(self) > 0
        if action := self.at.pop(self.looks, None):
            action()
        return found


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("check", [1, 2])
async def test_an_event_offered_while_the_consumer_falls_asleep_is_taken(check: int, closes: bool) -> None:
    feed, waiting = CountedFeed("watcher", 10), Interleaved()
    feed._waiting = waiting

    def offer() -> None:
        feed.offer(1)
        if closes:
            feed.close()

    # The consumer makes the second check after it has marked itself as asleep.
    waiting.at[check] = offer
    with anyio.fail_after(5):
        assert await feed.take() == [1]
        assert not closes or await feed.take() == []
    assert feed.wakeups == (check == 2) or closes


async def test_an_unnecessary_wake_up_does_no_harm() -> None:
    feed, taken = Feed[int]("watcher", 10), list[int]()
    async with anyio.create_task_group() as group:
        group.start_soon(take_all, feed, taken)
        await wait_all_tasks_blocked()
        feed._sleeper._bell.set()
        await wait_all_tasks_blocked()
        feed.offer(1)
        await wait_all_tasks_blocked()
        assert taken == [1]
        feed.close()


async def test_events_cross_threads_completely_and_in_order() -> None:
    feed, taken = Feed[int]("watcher", 100_000), list[int]()

    def produce() -> None:
        for number in range(20_000):
            feed.offer(number)
        feed.close()

    thread = threading.Thread(target=produce)
    thread.start()
    with anyio.fail_after(30):
        await take_all(feed, taken)
    thread.join()
    assert taken == list(range(20_000))
    assert numbers(feed) == (20_000, 0, 0)


async def test_a_closed_event_loop_ends_the_feed_and_not_the_producer() -> None:
    feed = Feed[int]("watcher", 10)

    def sleep_on_a_loop_that_ends() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(take_all(feed, []))
        loop.call_soon(loop.stop)
        loop.run_forever()
        feed._sleeper.is_asleep, asleep = False, feed._sleeper.is_asleep
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        feed._sleeper.is_asleep = (
            asleep  # restore the flag, as if the loop had been killed without ending its tasks
        )

    await anyio.to_thread.run_sync(sleep_on_a_loop_that_ends)
    assert feed.offer(1)
    assert not feed.offer(2)
    assert numbers(feed) == (0, 1, 0)


# -- observers --------------------------------------------------------------------------------------------------


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
