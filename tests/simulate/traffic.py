"""The clients of the simulated engine, whose prompts share beginnings, and the engine's operator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvoffload.core.machine import SlotState
from kvoffload.engine import EngineError, PoolExhausted, SamplingParams
from kvoffload.model import facts
from kvoffload.model.ids import SlotId
from tests.operations import replace_handler
from tests.simulate.scenario import LONGEST

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from kvoffload.engine import TokenStream
    from tests.simulate.simulation import Simulation

_MOST_NEW = 6
_TURNS = 4


class Conversation:
    """A client that holds a conversation, and sometimes aborts a turn."""

    def __init__(self, world: Simulation, number: int) -> None:
        self._world = world
        self._draws = world.scenario.draws(f"conversation {number}")
        self._prompt = list(world.text(self._draws.randrange(world.scenario.bases)))
        del self._prompt[self._draws.choice([self._draws.randint(1, len(self._prompt)), len(self._prompt)]) :]

    async def run(self) -> None:
        draws, world = self._draws, self._world
        await asyncio.sleep(draws.choice([0.0, 0.0, 0.01, 1.0]) * draws.random())
        for _ in range(draws.randint(1, _TURNS)):
            new_tokens = draws.randint(1, _MOST_NEW)
            if len(self._prompt) + new_tokens > LONGEST:
                return
            await world.turn(self._prompt, new_tokens, self._patience(draws))
            self._prompt += world.expected(self._prompt, new_tokens)
            self._prompt += draws.choices(range(5), k=draws.choice([0, 0, 1, 3]))
            if draws.random() < world.scenario.cold:
                await asyncio.sleep(draws.choice([0.05, 3.0]) * draws.random())
                if draws.random() < world.scenario.forgets:
                    world.engine.pool.reset_prefix_cache()

    def _patience(self, draws: random.Random) -> float | int | None:
        """Return the seconds (float) or tokens (int) after which the turn is aborted; None for no abort."""
        if draws.random() >= self._world.scenario.abort:
            return None
        return draws.randint(0, 3) if draws.random() < 0.5 else draws.uniform(0, 0.05)


async def read(stream: TokenStream, patience: float | int | None, found: list[int]) -> None:
    """Append tokens to `found` until the stream ends or the client aborts.

    Raises:
        EngineError: the engine reported an error instead of more tokens.
    """
    if isinstance(patience, float):
        try:
            async with asyncio.timeout(patience):
                await read(stream, None, found)
        except TimeoutError:
            await stream.aclose()
        return
    async with stream:
        if patience == 0:
            return
        async for token in stream:
            found.append(token.token_id)
            if len(found) == patience:
                return


async def turn(
    world: Simulation, prompt: list[int], new_tokens: int, patience: float | int | None = None
) -> None:
    """Run one request, and check its tokens. All tokens must arrive, unless the request is aborted.

    If the request's engine is killed, the request is sent again to the next engine.
    """
    while not world.is_open.is_set():  # the flag may have been cleared again before this task runs
        await world.is_open.wait()
    life, should = world.life, world.expected(prompt, new_tokens)
    stream = world.engine.submit(prompt, SamplingParams(new_tokens))
    found: list[int] = []
    try:
        await world.reading(read(stream, patience, found))
    except asyncio.CancelledError:
        if not world.is_ending(life):
            raise
        await turn(world, prompt, new_tokens, patience)
        return
    except EngineError as error:
        if not (world.has_lost_blocks and isinstance(error, PoolExhausted)):
            raise
        patience = 0
    if found != should[: len(found)]:
        raise AssertionError(f"{stream.request_id} got wrong tokens: {found}, not {should}")
    if patience is None and len(found) < new_tokens:
        raise AssertionError(f"{stream.request_id} ended after {len(found)} of {new_tokens} tokens")


def _device_forgets(world: Simulation) -> None:
    world.engine.pool.reset_prefix_cache()  # this does nothing while a request uses the cache


_ACTS: dict[str, Callable[[Simulation], object]] = {
    "reset": lambda world: world.reset(),
    "device_forgets": _device_forgets,
    "disk_rots": lambda world: world.disk.rots(),
    "disk_is_gone": lambda world: setattr(world.disk, "is_gone", True),
    "others_write": lambda world: world.store.others_write(),
    "store_evicts": lambda world: world.store.evict(),
    "store_dies": lambda world: setattr(world.store, "is_dead", True),
    "store_returns": lambda world: world.store.comes_back(),
    "store_restarts": lambda world: world.store.restart(),
    "store_fills": lambda world: setattr(world.store, "is_full", True),
}
"""Acts that take no time. The others are methods of `Operator`."""


class Operator:
    """An operator who resets caches, preempts requests, changes weights and causes faults while requests run."""

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._draws = world.scenario.draws("operator")

    async def run(self) -> None:
        for act in self._world.scenario.acts:
            await asyncio.sleep(self._draws.choice([0.0, 0.02, 0.3]) * self._draws.random())
            if act in _ACTS:
                _ACTS[act](self._world)
            else:
                await getattr(self, f"_{act}")()

    async def _preempt(self) -> None:
        running = [request.request_id for request in self._world.engine._scheduler.running]
        if running:
            self._world.engine.preempt(self._draws.choice(running))

    async def _new_weights(self) -> None:
        """Reset the caches once all requests have ended, and change the weights once all blocks are free."""
        world = self._world
        world.is_open.clear()
        await world.until(lambda: not world.engine._scheduler.has_requests)
        world.reset()
        for _ in range(30):
            if world.engine.pool.reset_prefix_cache():
                world.runner.weights += 1
                break
            await asyncio.sleep(world.scenario.timeout_s / 10)
        world.is_open.set()

    async def _rank_dies(self) -> None:
        """Make a rank's copies hang from now on, without reporting an error."""
        rank = self._draws.randrange(self._world.engine.config.ranks)
        self._world.copiers[rank].is_dead = True

    async def _restart(self) -> None:
        """Kill or stop the engine's process, and start another engine on its disk."""
        self._world.end_life(self._draws.choice(["kill", "kill", "power fails", "stop"]))
        await self._world.is_open.wait()

    async def _corrupt(self) -> None:
        """Corrupt a byte of a host slot that no copy uses, on one rank."""
        world, pool = self._world, self._world.offload.core.state.pool
        slots = [slot for slot in map(SlotId, range(pool.capacity)) if pool.state(slot) is SlotState.READY]
        if slots:
            arena = self._draws.choice(world.plugin.workers).pump._arena
            page = self._draws.choice(arena.pages(self._draws.choice(slots)))
            page[self._draws.randrange(len(page))] ^= 1 << self._draws.randrange(8)

    async def _coroutine_dies(self) -> None:
        self._draws.choice(self._world.plugin.workers)._tasks[1].cancel()

    async def _break(self) -> None:
        """Make the core's handler of steps raise from now on. Offloading ends, but requests are served (R12)."""

        def broken(fact: facts.Fact) -> None:
            raise RuntimeError("a state handler raises")

        replace_handler(self._world.offload.core, facts.StepScheduled, broken)
