"""`kvoffload bench engine`: what offloading costs and brings a whole engine, measured on the reference engine.

* Prompts that never repeat, with over without (`no_reuse.py`): what it costs where it cannot help.
* Steps bound by Python, with the rank's threads idle or copying (`engine_steps.py`).
* Time to first token of turns that come back to a conversation whose KV the device has had to give up: the working set is
  four times the device's cache. Both engines play every round, one after the other, with the same prompts.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvoffload.bench import drawings
from kvoffload.bench.output import add_output_arguments, check_output, give_out, heading
from kvoffload.bench.results import machine
from kvoffload.bench.spread import Spread
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.ending import run_async
from kvoffload.cli.exits import Exit
from kvoffload.cli.parser import positive

if TYPE_CHECKING:
    from kvoffload.bench.engine_steps import Steps
    from kvoffload.cli.demo.no_reuse import NoReuse

HELP = "throughput, step time and time to first token of the reference engine, with offloading and without"

_STEP_MIB = 16  # of a load, while steps are timed
_TURNS = 3


@dataclass(frozen=True, slots=True)
class Returns:
    """Times to first token of returning turns.

    Args:
        pairs: seconds without and with offloading, for each turn.
        kv_to_cache: how many times the device's cache the conversations need.
    """

    pairs: tuple[tuple[float, float], ...]
    kv_to_cache: float

    def to_plain(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "working_set_to_cache": round(self.kv_to_cache, 2),
            "turns": len(self.pairs),
            "recomputing_ms": Spread.of([1e3 * plain for plain, _ in self.pairs]).to_plain(),
            "offloaded_ms": Spread.of([1e3 * offloaded for _, offloaded in self.pairs]).to_plain(),
            "times_sooner": Spread.of([plain / offloaded for plain, offloaded in self.pairs]).to_plain(),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("--pairs", type=positive, default=20, help="of prompts that never repeat")
    parser.add_argument("--steps", type=positive, default=100, help="timed in each of the repeats")
    parser.add_argument("--repeats", type=positive, default=15, help="measurements of step time")
    parser.add_argument("--conversations", type=positive, default=10, help="whose turns come back")
    parser.add_argument("--model", choices=("small", "tiny"), default="small", help="tiny: for a quick look")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the prompts")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        CommandError: the results cannot be written, or memory cannot be had.
    """
    check_output(args)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded; the demo says why
    from kvoffload.bench.engine_steps import measure_steps

    about = machine()
    options = demo_options(args)
    no_reuse = run_async(measure_no_reuse(options, args.pairs))
    steps = measure_steps(_STEP_MIB * 2**20, args.repeats, args.steps)
    returns = run_async(measure_returns(options))
    told = {
        "machine": about,
        "engine": f"reference engine, {args.model} model, on the CPU",
        "method": method(args),
        "no_reuse": no_reuse_told(no_reuse),
        "step_time": steps.to_plain(),
        "returning_turns": returns.to_plain(),
    }
    give_out("engine", told, args, _table(told, no_reuse, steps), drawings.engine)
    return Exit.OK


def demo_options(args: argparse.Namespace) -> DemoOptions:
    """Return the engines and the conversations, as the demo takes them."""
    first, later = (1280, 128) if args.model == "small" else (256, 32)
    return DemoOptions(
        conversations=args.conversations,
        turns=_TURNS,
        first_tokens=first,
        turn_tokens=later,
        model=args.model,
        seed=args.seed,
    )


async def measure_no_reuse(options: DemoOptions, pairs: int) -> NoReuse:
    """Measure prompts that never repeat."""
    from kvoffload.cli.demo.engines import open_engines
    from kvoffload.cli.demo.no_reuse import NoReuseSettings, measure

    settings = NoReuseSettings(
        pairs=pairs,
        prompts=options.concurrency,
        prompt_tokens=options.first_tokens,
        answer_tokens=options.answer_tokens,
        seed=options.seed,
    )
    async with open_engines(options) as engines:
        return await measure(engines.plain, engines.offloaded, settings)


async def measure_returns(options: DemoOptions) -> Returns:
    """Play conversations on both engines, round by round, and compare each returning turn."""
    from kvoffload.cli.demo.conversations import make_conversations
    from kvoffload.cli.demo.engines import kv_blocks, open_engines
    from kvoffload.cli.demo.play import Player, warm_up

    text = random.Random(options.seed).randbytes(options.conversations * options.message_tokens)
    make = partial(
        Player, conversations=make_conversations(text, options), options=options, told=lambda: None
    )
    async with open_engines(options) as engines:
        both = (engines.plain, engines.offloaded)
        for engine in both:
            await warm_up(engine, options.first_tokens, options.seed)
        plain = make(both[0])
        offloaded = make(both[1], script=plain.answers)
        for number in range(options.turns):
            await plain.play_round(number)
            await offloaded.play_round(number)
        pairs = zip(plain.result().turns, offloaded.result().turns, strict=True)
        return Returns(
            tuple((one.ttft_s, other.ttft_s) for one, other in pairs if one.turn.turn > 0),
            kv_blocks(options, both[0].config) / both[0].pool.usable_blocks,
        )


def no_reuse_told(result: NoReuse) -> dict[str, object]:
    """Return it for JSON."""
    ratios = Spread.of([pair.ratio for pair in result.pairs])
    return {
        "pairs": len(result.pairs),
        "tokens_per_s_without": round(result.plain_median),
        "tokens_per_s_with": round(result.offloaded_median),
        "with_over_without": ratios.to_plain(),
    }


def method(args: argparse.Namespace) -> str:
    """Return in a sentence how it was measured."""
    return (
        f"{args.pairs} pairs of prompts, {args.repeats} repeats of {args.steps} steps, {args.conversations} conversations of "
        f"{_TURNS} turns; engines in turns in one process; medians of the pairs' ratios [95 % interval]"
    )


def _table(told: Mapping[str, object], no_reuse: NoReuse, steps: Steps) -> Iterator[str]:
    returns = told["returning_turns"]
    assert isinstance(returns, dict)
    yield from heading(f"Offloading on a whole engine: {told['engine']}", told)
    form = "{:<66}{:>26}"
    yield form.format(
        "throughput on prompts that never repeat, with over without",
        Spread.of([pair.ratio for pair in no_reuse.pairs]).text("{:.3f}"),
    )
    for name, what in (("idle", "nothing pending"), ("pending", "copies pending")):
        shown = steps.ratio(name).text("{:.3f}")
        yield form.format(f"step bound by Python, {what}, over no threads", shown)
    switches = "not known" if steps.switches is None else steps.switches
    yield form.format(f"wake-ups in {steps.steps} steps with nothing pending", steps.wake_ups)
    yield form.format("  switches of the process's other threads in that time", switches)
    yield form.format(
        f"first token of {returns['turns']} returning turns, times sooner than recomputed",
        Spread(**returns["times_sooner"]).text("{:.1f}", "x"),
    )
    yield form.format("  working set, times the device's cache", returns["working_set_to_cache"])
