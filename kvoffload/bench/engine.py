"""`kvoffload bench engine`: what offloading costs and brings a whole engine, measured on the reference engine.

* Prompts that never repeat, with over without (`no_reuse.py`): what it costs where it cannot help.
* Steps bound by Python, with the rank's threads idle or copying (`engine_steps.py`).
* Time to first token of returning turns of conversations whose KV the device has evicted: the working set is
  four times the device's cache. Both engines play every round, one after the other, with the same prompts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial

from kvoffload.bench.lines import Line, line, ratios
from kvoffload.bench.results import add_output_arguments, give_out
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.exits import CommandError
from kvoffload.cli.parser import positive
from kvoffload.cli.signals import run_async

HELP = "throughput, step time and time to first token of the reference engine, with offloading and without"

_STEP_BYTES = 16 * 2**20  # of a load, while steps are timed
_TURNS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's options."""
    parser.add_argument("--pairs", type=positive, default=20, help="of prompts that never repeat")
    parser.add_argument("--repeats", type=positive, default=15, help="measurements of step time")
    parser.add_argument("--conversations", type=positive, default=10, help="whose turns come back")
    parser.add_argument("--model", choices=("small", "tiny"), default="small", help="tiny: for a quick look")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        CommandError: the results cannot be written, memory cannot be had, or an audit found problems.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded; the demo says why
    method = (
        f"reference engine, {args.model} model, on the CPU; {args.pairs} pairs of prompts, {args.repeats} repeats of steps, "
        f"{args.conversations} conversations of {_TURNS} turns; engines in turns in one process; medians of the pairs' "
        "ratios [95 % interval]"
    )
    return give_out("engine", args, method, _measure(args))


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    from kvoffload.bench.engine_steps import measure_steps

    first, later = (1280, 128) if args.model == "small" else (256, 32)
    options = DemoOptions(
        conversations=args.conversations,
        turns=_TURNS,
        first_tokens=first,
        turn_tokens=later,
        model=args.model,
    )
    yield run_async(_no_reuse(options, args.pairs))
    yield from measure_steps(_STEP_BYTES, args.repeats)
    yield from run_async(_returning(options))


async def _no_reuse(options: DemoOptions, pairs: int) -> Line:
    from kvoffload.bench.no_reuse import measure
    from kvoffload.cli.demo.engines import audit_offloading, open_engines

    async with open_engines(options) as engines:
        rates = await measure(engines.plain, engines.offloaded, pairs, options.first_tokens)
        if problems := audit_offloading(engines.offload):
            raise CommandError("; ".join(problems))
    what = "throughput on prompts that never repeat, reference engine, with over without"
    return line(what, [one.offloaded / one.plain for one in rates], at_least=0.99)


async def _returning(options: DemoOptions) -> list[Line]:
    """Play conversations on both engines, round by round, and compare each returning turn."""
    from kvoffload.cli.demo.engines import kv_blocks, open_engines
    from kvoffload.cli.demo.play import Player, make_conversations, warm_up

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
