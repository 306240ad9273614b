"""Engines that share a store: what the second engine gains, what the store costs the hooks, and what it costs while it fails.

* A second engine serves prompts that another engine computed and wrote to the store, in turns with an engine that recomputes them.
* Conversations that outgrow the host are played by four engines in turns: without a store, with an empty one that nothing is written
  to, with one that works, and with one that is dead.
* An engine serves a ring of prompts that fits neither its device nor its host, so that each comes from the store. Its tokens are
  counted in windows of a second while something is done to the store, and after that is over.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from kvoffload.bench.lines import Line, line, not_run, ratios
from kvoffload.bench.remote_failures import FAILURES, Begin, LocalStore
from kvoffload.bench.tier_hooks import HOST, NEVER, OUTGROWS, hook_seconds, moved, served, until
from kvoffload.cli.demo.command import local_store
from kvoffload.cli.demo.engines import engine_config
from kvoffload.cli.demo.options import LOCAL_STORES, DemoOptions
from kvoffload.cli.demo.play import idle
from kvoffload.cli.exits import CommandError
from kvoffload.cli.signals import run_async
from kvoffload.engine import Engine, SamplingParams
from kvoffload.telemetry.labels import TierState

_NODE_BYTES = 2**29
_ANSWER = 4
_RING, _RING_TOKENS, _CLIENTS = 32, 320, 2
_HOST_SHARE = 3  # of the ring; fetches may fill a quarter of the host: a prompt of each client
_FLOAT_BYTES = 4  # of the engine's KV


def measure_engines(args: argparse.Namespace) -> Iterator[Line]:
    """Measure on each store that was asked for.

    Raises:
        RemoteError: a store does not start.
        CommandError: it brings nothing where it should.
    """
    for store in args.store:
        with local_store(store, _NODE_BYTES) as server:
            yield from run_async(_second_engine(LOCAL_STORES[store], server, args))
    yield from run_async(_hooks(args.store[0]))
    without = run_async(_without_a_store(args))
    floor = _mean(without)
    yield replace(
        line(
            f"tokens on a ring of {_RING} prompts that outgrows device and host, without a store",
            [floor],
            "/s",
        ),
        curve=without,
    )
    for store in args.store:
        for what, begin in FAILURES[store].items():
            name = f"{LOCAL_STORES[store]}, {what}"
            try:
                with local_store(store, _NODE_BYTES) as server:
                    found = run_async(_failing(server, begin, args))
                yield from _curve_lines(name, found, floor)
            except CommandError as error:  # what the others have found is kept
                yield not_run(f"tokens/s, {name}", error)


# -- what it brings -------------------------------------------------------------------------------------------------


async def _second_engine(name: str, server: LocalStore, args: argparse.Namespace) -> list[Line]:
    """Have one engine write prompts to the store, and another begin on them."""
    tokens = 1280 if args.model == "small" else 512
    options = DemoOptions(
        conversations=args.conversations,
        turns=1,
        first_tokens=tokens,
        answer_tokens=_ANSWER,
        model=args.model,
    )
    settings = {"host_bytes": "256MiB", "remote_url": server.url, "share_after_hits": 0}
    prompts = _prompts(args.conversations, tokens)
    async with served(options, settings) as (first, side):
        for prompt in prompts:
            await _first_token_s(first, prompt)
        await until(
            first,
            "all blocks to be written",
            lambda: moved(side, "remote", "store") >= args.conversations * (tokens // 16 - 1),
        )
    taken: dict[str, list[float]] = {"recomputed": [], "shared": []}
    async with served(options, settings) as (second, side), served(options, {}) as (plain, _):
        for number, prompt in enumerate(prompts):
            both = [("recomputed", plain), ("shared", second)]
            for which, engine in both[:: 1 if number % 2 else -1]:
                taken[which].append(1e3 * await _first_token_s(engine, prompt))
        fetched = moved(side, "remote", "load")
    if not fetched:
        raise CommandError(f"nothing was fetched from {name}, so there is nothing to time")
    what = f"first token of a prefix that another engine computed, {name}"
    return [
        line(f"{what}: sooner than recomputed", ratios(taken["recomputed"], taken["shared"]), at_least=3),
        line(f"{what}: recomputed", taken["recomputed"], " ms"),
        line(f"{what}: with the store", taken["shared"], " ms"),
    ]


# -- what it costs --------------------------------------------------------------------------------------------------


async def _hooks(kind: str) -> list[Line]:
    """Measure hooks without a store, with an idle one, with one that works, and with a dead one."""
    async with AsyncExitStack() as opened:
        # First: an engine reads the endpoint of a bucket from the environment, where the store that works replaces it.
        dies = opened.enter_context(local_store(kind, _NODE_BYTES))
        dead = await opened.enter_async_context(served(OUTGROWS, {**HOST, "remote_url": dies.url}))
        dies.close()
        await until(dead[0], "the store to fail", lambda: dead[1].gauges().remote is TierState.FAILING)
        working = {**HOST, "remote_url": opened.enter_context(local_store(kind, _NODE_BYTES)).url}
        idle = {**working, "share_after_hits": NEVER, "disk_identity": "another"}
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


# -- while it fails -------------------------------------------------------------------------------------------------


async def _without_a_store(args: argparse.Namespace) -> list[int]:
    """Return the tokens of each second without a store."""
    options = _ring_options(args)
    async with served(options, {"host_bytes": _ring_host(options)}) as (engine, _), _ring(engine) as tokens:
        await _counted(tokens, args.seconds)
        return (await _counted(tokens, args.seconds))[-args.seconds :]


async def _failing(server: LocalStore, begin: Begin, args: argparse.Namespace) -> tuple[list[int], int, int]:
    """Make a store fail for a while, and count the tokens of an engine that uses it.

    Returns:
        The tokens of each second, and the seconds in which the failure began and ended.
    """
    options = _ring_options(args)
    settings = {"host_bytes": _ring_host(options), "remote_url": server.url, "share_after_hits": 0}
    async with served(options, settings) as (engine, side), _ring(engine) as tokens:
        await until(
            None,
            "half the ring to be fetched",
            lambda: moved(side, "remote", "load") >= _RING * _RING_TOKENS // 16 // 2,
        )
        unheeded = len(tokens)  # whole seconds only
        await _counted(tokens, args.seconds)
        begins = len(tokens) - 1  # the second that has just begun
        end = await asyncio.to_thread(begin, server)
        await _counted(tokens, args.seconds)
        await asyncio.to_thread(end)
        ends = len(tokens) - 1
        await _counted(tokens, args.seconds)
        return tokens[unheeded:-1], begins - unheeded, ends - unheeded


def _ring_options(args: argparse.Namespace) -> DemoOptions:
    return DemoOptions(
        conversations=_RING, turns=1, first_tokens=_RING_TOKENS, answer_tokens=_ANSWER, model=args.model
    )


def _ring_host(options: DemoOptions) -> int:
    """Return the bytes of a host that holds a part of the ring."""
    model = engine_config(options).model
    token_bytes = 2 * model.layers * model.kv_heads * model.head_dim * _FLOAT_BYTES
    return _RING * _RING_TOKENS * token_bytes // _HOST_SHARE


@asynccontextmanager
async def _ring(engine: Engine) -> AsyncIterator[list[int]]:
    """Have clients serve a ring of prompts; the list gets the tokens of each second, the last one still under way."""
    prompts, tokens, now = (
        itertools.cycle(_prompts(_RING, _RING_TOKENS)),
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


async def _counted(tokens: list[int], seconds: int) -> list[int]:
    """Wait for `seconds` more full seconds; return the tokens of all full seconds."""
    end = len(tokens) + seconds
    while len(tokens) < end:  # noqa: ASYNC110  # a list has no event for it
        await asyncio.sleep(0.01)
    return tokens[:-1]


def _curve_lines(what: str, found: tuple[list[int], int, int], floor: float) -> Iterator[Line]:
    """Return what a failure costs, with the curve beside the first line."""
    tokens, begins, ends = found
    before, meanwhile = _mean(tokens[:begins]), _mean(tokens[begins:ends])
    yield replace(
        line(f"tokens/s over those before, {what}", [meanwhile / before]),
        curve=tuple(tokens),
        marks=(begins, ends),
    )
    yield line(f"tokens/s over those without a store, {what}", [meanwhile / floor])
    yield line(f"tokens/s afterwards over those before, {what}", [_mean(tokens[ends:]) / before])


def _mean(tokens: list[int]) -> float:
    """Return the tokens of a second.

    Raises:
        CommandError: there are none.
    """
    if not any(tokens):
        raise CommandError(
            f"no token came within {len(tokens)} seconds: the machine is too busy to measure anything"
        )
    return statistics.fmean(tokens)


# -- engines --------------------------------------------------------------------------------------------------------


async def _first_token_s(engine: Engine, prompt: list[int]) -> float:
    async with engine.submit(prompt, SamplingParams(_ANSWER)) as stream:
        async for _ in stream:
            pass
    await idle(engine)
    assert stream.stats.first_token_s is not None
    return stream.stats.first_token_s - stream.stats.arrived_s


def _prompts(count: int, tokens: int) -> list[list[int]]:
    draw = random.Random(1)  # another seed than the warm-up's, which would be the first prompt
    return [draw.choices(range(256), k=tokens) for _ in range(count)]
