"""The simulated loop: jumping time, random order, and waits that cannot end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.simulate.loop import SimClock, SimLoop, SimPortal, Stuck


@contextmanager
def a_loop(seed: int | None = None) -> Iterator[SimLoop]:
    loop = SimLoop(random.Random(seed) if seed is not None else None)
    try:
        yield loop
    finally:
        loop.close()


def test_sleeping_for_an_hour_costs_nothing_and_takes_an_hour_of_its_time() -> None:
    with a_loop() as loop:
        loop.run_until_complete(SimClock(loop).sleep(500.0))
        assert loop.time() == 500.0


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    woken = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append(seconds)

    async def all_of_them() -> None:
        await asyncio.gather(*(sleep(seconds) for seconds in (3.0, 1.0, 2.0)))

    with a_loop(0) as loop:
        loop.run_until_complete(all_of_them())
    assert woken == [1.0, 2.0, 3.0]


def test_a_wait_that_nothing_can_end_is_reported_and_not_waited_for() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with a_loop() as loop:
        task = loop.create_task(wait())
        with pytest.raises(Stuck, match="nothing is under way"):
            loop.run_until_complete(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)


def test_a_wait_that_only_looks_busy_ends_too() -> None:
    async def poll() -> None:
        for _ in range(10_000):
            await asyncio.sleep(1.0)

    with a_loop() as loop:
        task = loop.create_task(poll())
        with pytest.raises(Stuck, match="not over"):
            loop.run_until_complete(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)


def order(seed: int | None) -> list[int]:
    ran: list[int] = []

    async def all_of_them() -> None:
        for number in range(8):
            asyncio.get_running_loop().call_soon(ran.append, number)
        await asyncio.sleep(0.001)

    with a_loop(seed) as loop:
        loop.run_until_complete(all_of_them())
    return ran


def test_the_order_of_what_is_ready_is_drawn_and_the_same_for_a_seed() -> None:
    assert order(None) == list(range(8))
    assert order(1) == order(1) != list(range(8))
    assert {tuple(order(seed)) for seed in range(5)} != {tuple(order(1))}


def test_a_cancelled_timer_does_not_hold_time_up() -> None:
    async def deadline() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.sleep(100.0)

    with a_loop() as loop:
        loop.run_until_complete(deadline())
        assert loop.time() == 1.0


def test_waiting_for_what_the_portal_runs_runs_the_loop() -> None:
    async def answer() -> int:
        await asyncio.sleep(7.0)
        return 42

    with a_loop() as loop:
        assert SimPortal(loop).spawn(answer).result() == 42
        assert loop.time() == 7.0
