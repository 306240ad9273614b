"""Measures what offloading costs and gains in the reference engine.

* Throughput on prompts that never repeat, compared with an engine without offloading. Both engines serve the
  same prompts, one engine after the other, in alternating order. An engine's time includes its copies.
* Time to first token when a conversation returns after the device has evicted its KV: the conversations need
  four times the device's cache. Both engines play every round with the same prompts, one engine after the
  other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator
from functools import partial

from kvoffload.checks.options import positive
from kvoffload.cli.demo.engines import audit_offloading, kv_blocks, open_engines
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Player, idle, make_conversations, warm_up
from kvoffload.cli.exits import CommandError
from kvoffload.engine import Engine, SamplingParams
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out

_TURNS = 3
_AT_ONCE, _ANSWER_TOKENS = 2, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=positive, default=20, help="of prompts that never repeat")
    parser.add_argument("--conversations", type=positive, default=10, help="whose turns come back")
    parser.add_argument("--model", choices=("small", "tiny"), default="small", help="tiny: for a quick look")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    method = (
        f"reference engine, {args.model} model, on the CPU; {args.pairs} pairs of prompts, {args.conversations} conversations "
        f"of {_TURNS} turns; engines in turns in one process; medians of the pairs' ratios [95 % interval]"
    )
    return give_out("engine", args, method, _measure(args))


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    first, later = (1280, 128) if args.model == "small" else (256, 32)
    options = DemoOptions(
        conversations=args.conversations,
        turns=_TURNS,
        first_tokens=first,
        turn_tokens=later,
        model=args.model,
    )
    yield asyncio.run(_never_repeating(options, args.pairs))
    yield from asyncio.run(_returning(options))


async def _never_repeating(options: DemoOptions, pairs: int) -> Line:
    draw, found = random.Random(0), list[float]()
    async with open_engines(options) as engines:
        vocabulary = range(engines.plain.config.model.vocab_size)
        for number in range(pairs + 1):
            # The prompts are random, so no two share a first block.
            asked = [draw.choices(vocabulary, k=options.first_tokens) for _ in range(_AT_ONCE)]
            both = (engines.plain, engines.offloaded)
            seconds = {engine: await _serve(engine, asked) for engine in both[:: 1 if number % 2 else -1]}
            if number:  # The first pair is a warm-up.
                found.append(seconds[engines.plain] / seconds[engines.offloaded])
        if problems := audit_offloading(engines.offload):
            raise CommandError("; ".join(problems))
    what = "throughput on prompts that never repeat, reference engine, with over without"
    return line(what, found, at_least=0.99)


async def _serve(engine: Engine, prompts: list[list[int]]) -> float:
    """Serve the prompts, and return the seconds until the engine has no work left."""

    async def ask(prompt: list[int]) -> None:
        async with engine.submit(prompt, SamplingParams(_ANSWER_TOKENS)) as stream:
            async for _ in stream:
                pass

    clock = asyncio.get_running_loop().time
    begun = clock()
    await asyncio.gather(*map(ask, prompts))
    await idle(engine)
    return clock() - begun


async def _returning(options: DemoOptions) -> list[Line]:
    """Play the same conversations on both engines, and compare the times to first token of returning turns."""
    make = partial(Player, conversations=make_conversations(options), options=options, on_turn=lambda _: None)
    async with open_engines(options) as engines:
        both = (engines.plain, engines.offloaded)
        for engine in both:
            await warm_up(engine, options.first_tokens, options.seed)
        plain = make(both[0])
        offloaded = make(both[1], script=plain.answers)
        for number in range(options.turns):
            await plain.play_round(number)
            await offloaded.play_round(number)
        size = kv_blocks(options, both[0].config) / both[0].pool.usable_blocks
    recomputed, loaded = (
        [1e3 * turn.ttft_s for turn in played.turns if turn.turn.turn > 0] for played in (plain, offloaded)
    )
    what = f"first token of returning turns, working set {size:.0f} times the device's cache"
    return [
        line(f"{what}: sooner than recomputed", ratios(recomputed, loaded), at_least=3),
        line(f"{what}: recomputed", recomputed, " ms"),
        line(f"{what}: with offloading", loaded, " ms"),
    ]
