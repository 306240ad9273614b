"""Measures engines that share a remote tier: what a second engine gains, and what the tier costs, also while it hangs.

* A second engine serves prompts whose blocks another engine has written to the remote tier. The second engine
  alternates with an engine that computes the same prompts.
* Four engines alternate: without a remote tier, and with an idle, a working and a dead remote tier. Their
  conversations do not fit in host memory.
* An engine serves a ring of prompts that fits neither on the device nor on the host, so that the engine fetches
  each prompt from the remote tier. Then the bench suspends the process with the values, and resumes it. The bench
  counts tokens per second before, during and after the suspension.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from kvoffload.cli.demo.command import local_store
from kvoffload.cli.demo.engines import engine_config
from kvoffload.cli.demo.options import LOCAL_STORES, DemoOptions
from kvoffload.cli.demo.play import idle
from kvoffload.cli.exits import CommandError
from kvoffload.engine import Engine, SamplingParams
from kvoffload.model.wire import Tier
from kvoffload.remote.local import LocalBucket, LocalMooncake
from kvoffload.telemetry.catalogue import TierState, tier_state
from tests.bench.lines import Line, line, ratios
from tests.bench.tier_hooks import HOST, NEVER, OUTGROWS, hook_seconds, moved, served, until
from tests.remote.servers import resume, suspend

LocalStore: TypeAlias = LocalMooncake | LocalBucket

_NODE_BYTES = 2**29
_ANSWER = 4
_RING, _RING_TOKENS, _CLIENTS = 32, 320, 2
# Host memory has room for a third of the ring. All open fetches may fill a quarter of it: one prompt per client.
_HOST_SHARE = 3
_FLOAT_BYTES = 4  # of a float32 number in the engine's KV


def measure_engines(args: argparse.Namespace) -> Iterator[Line]:
    for store in args.store:
        with local_store(store, _NODE_BYTES) as server:
            yield from asyncio.run(_second_engine(LOCAL_STORES[store], server, args))
    yield from asyncio.run(_hooks(args.store[0]))
    without = asyncio.run(_without_a_store(args))
    yield line(
        f"tokens on a ring of {_RING} prompts that outgrows device and host, without a store", [without], "/s"
    )
    for store in args.store:
        with local_store(store, _NODE_BYTES) as server:
            before, meanwhile, afterwards = asyncio.run(_hanging(server, args))
        name = f"{LOCAL_STORES[store]}, node hangs"
        yield line(f"tokens/s over those before, {name}", [meanwhile / before])
        yield line(f"tokens/s over those without a store, {name}", [meanwhile / without])
        yield line(f"tokens/s afterwards over those before, {name}", [afterwards / before])


# -- a second engine ------------------------------------------------------------------------------------------------


async def _second_engine(name: str, server: LocalStore, args: argparse.Namespace) -> list[Line]:
    """Measure an engine that serves prompts after another engine has written their blocks to the remote tier."""
    tokens = 1280 if args.model == "small" else 512
    options = DemoOptions(
        conversations=args.conversations,
        turns=1,
        first_tokens=tokens,
        answer_tokens=_ANSWER,
        model=args.model,
    )
    memory = {"host_bytes": "256MiB"}
    settings = {**memory, "remote_url": server.url, "remote_min_hits": 0}
    prompts = draw_prompts(args.conversations, tokens)
    async with served(options, settings) as (first, side):
        for prompt in prompts:
            await first_token_s(first, prompt)
        await until(
            first,
            "all blocks to be written",
            lambda: moved(side, "remote", "store") >= args.conversations * (tokens // 16 - 1),
        )
    taken: dict[str, list[float]] = {"recomputed": [], "shared": []}
    async with served(options, settings) as (second, side), served(options, memory) as (plain, _):
        for number, prompt in enumerate(prompts):
            both = [("recomputed", plain), ("shared", second)]
            for which, engine in both[:: 1 if number % 2 else -1]:
                taken[which].append(1e3 * await first_token_s(engine, prompt))
        fetched = moved(side, "remote", "load")
    if not fetched:
        raise CommandError(f"nothing was fetched from {name}, so there is nothing to time")
    what = f"first token of a prefix that another engine computed, {name}"
    return [
        line(f"{what}: sooner than recomputed", ratios(taken["recomputed"], taken["shared"]), at_least=3),
        line(f"{what}: recomputed", taken["recomputed"], " ms"),
        line(f"{what}: with the store", taken["shared"], " ms"),
    ]


# -- time in hooks --------------------------------------------------------------------------------------------------


async def _hooks(kind: str) -> list[Line]:
    """Measure the time in hooks without a remote tier, and with an idle, a working and a dead remote tier."""
    async with AsyncExitStack() as opened:
        # Start the dead remote tier first: an engine reads a bucket's endpoint from the environment, where the working
        # remote tier's endpoint replaces the dead one.
        dies = opened.enter_context(local_store(kind, _NODE_BYTES))
        dead = await opened.enter_async_context(served(OUTGROWS, {**HOST, "remote_url": dies.url}))
        dies.close()
        await until(
            dead[0], "the store to fail", lambda: tier_state(dead[1], Tier.REMOTE) is TierState.FAILING
        )
        working = {**HOST, "remote_url": opened.enter_context(local_store(kind, _NODE_BYTES)).url}
        idle = {**working, "remote_min_hits": NEVER, "weights_id": "another"}
        none = await opened.enter_async_context(served(OUTGROWS, HOST))
        rests = await opened.enter_async_context(served(OUTGROWS, idle))
        busy = await opened.enter_async_context(served(OUTGROWS, working))
        spent = await hook_seconds({"none": none, "idle": rests, "working": busy, "dead": dead})
        if not moved(busy[1], "remote", "load"):
            raise CommandError("nothing was fetched from the store, so the tier did not work")
    what = "time in the scheduler's hooks with a store, over without; reference engine"
    none_s = spent["none"]
    return [
        line(f"{what}, idle", ratios(spent["idle"], none_s), at_most=1.05),
        line(f"{what}, while it works", ratios(spent["working"], none_s)),
        line(f"{what}, while the store is dead", ratios(spent["dead"], none_s)),
    ]


# -- a remote tier that hangs ---------------------------------------------------------------------------------------


async def _without_a_store(args: argparse.Namespace) -> float:
    options = _ring_options(args)
    async with served(options, {"host_bytes": _ring_host(options)}) as (engine, _), _ring(engine) as tokens:
        await _rate(tokens, args.seconds)  # a warm-up
        return await _rate(tokens, args.seconds)


async def _hanging(server: LocalStore, args: argparse.Namespace) -> tuple[float, float, float]:
    """Suspend the process with the remote tier's values, and resume it.

    Returns:
        The tokens per second of an engine that uses the remote tier: before, during and after the suspension.
    """
    process = server.node if isinstance(server, LocalMooncake) else server.server
    options = _ring_options(args)
    settings = {"host_bytes": _ring_host(options), "remote_url": server.url, "remote_min_hits": 0}
    async with served(options, settings) as (engine, side), _ring(engine) as tokens:
        await until(
            None,
            "half the ring to be fetched",
            lambda: moved(side, "remote", "load") >= _RING * _RING_TOKENS // 16 // 2,
        )
        await _rate(tokens, 1)  # wait until the clock reaches a whole second
        before = await _rate(tokens, args.seconds)
        suspend(process)
        meanwhile = await _rate(tokens, args.seconds)
        resume(process)
        return before, meanwhile, await _rate(tokens, args.seconds)


def _ring_options(args: argparse.Namespace) -> DemoOptions:
    return DemoOptions(
        conversations=_RING, turns=1, first_tokens=_RING_TOKENS, answer_tokens=_ANSWER, model=args.model
    )


def _ring_host(options: DemoOptions) -> int:
    """Return the size of a host memory that has room for only a part of the ring, in bytes."""
    model = engine_config(options).model
    token_bytes = 2 * model.layers * model.kv_heads * model.head_dim * _FLOAT_BYTES
    return _RING * _RING_TOKENS * token_bytes // _HOST_SHARE


@asynccontextmanager
async def _ring(engine: Engine) -> AsyncIterator[list[int]]:
    """Serve a ring of prompts during the `with` block. Append each second's number of tokens to the yielded list."""
    prompts, tokens, now = (
        itertools.cycle(draw_prompts(_RING, _RING_TOKENS)),
        [0],
        asyncio.get_running_loop().time,
    )

    async def serve() -> None:
        for prompt in prompts:
            async with engine.submit(prompt, SamplingParams(_ANSWER)) as stream:
                brought = len(prompt)
                async for _ in stream:
                    tokens[-1] += brought + 1
                    brought = 0

    async def tick() -> None:
        began = now()
        while True:
            await asyncio.sleep(began + len(tokens) - now())
            tokens.append(0)

    tasks = [asyncio.create_task(one) for one in (tick(), *(serve() for _ in range(_CLIENTS)))]
    try:
        yield tokens
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _rate(tokens: list[int], seconds: int) -> float:
    """Return the mean tokens per second over `seconds` seconds, of which the current second is the first.

    Raises:
        CommandError: the engine generated no token.
    """
    first = len(tokens) - 1
    while len(tokens) <= first + seconds:  # noqa: ASYNC110  # a list has no event for it
        await asyncio.sleep(0.01)
    counted = tokens[first : first + seconds]
    if not any(counted):
        raise CommandError(
            f"no token came within {seconds} seconds: the machine is too busy to measure anything"
        )
    return statistics.fmean(counted)


# -- engines --------------------------------------------------------------------------------------------------------


async def first_token_s(engine: Engine, prompt: list[int]) -> float:
    async with engine.submit(prompt, SamplingParams(_ANSWER)) as stream:
        async for _ in stream:
            pass
    await idle(engine)
    assert stream.stats.first_token_s is not None
    return stream.stats.first_token_s - stream.stats.arrived_s


def draw_prompts(count: int, tokens: int) -> list[list[int]]:
    draw = random.Random(1)  # the warm-up's seed, 0, would repeat the warm-up's prompt
    return [draw.choices(range(256), k=tokens) for _ in range(count)]
