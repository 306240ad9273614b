"""`kvoffload bench scale`: the scheduler's side with many requests and slots, without an engine, copies simulated.

Four parts: idle requests, lookups, memory of slots, and growth over a stream of requests. Each is measured on the real
`SchedulerSide`; only the engine around it and the copies are not there.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvoffload.bench.output import add_output_arguments, check_output, give_out
from kvoffload.bench.results import machine
from kvoffload.bench.scale import growth, idle, lookups, memory
from kvoffload.bench.scale.engineless import Speeds
from kvoffload.bench.scale.picture import draw
from kvoffload.bench.scale.table import table
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.parser import positive

HELP = "the scheduler's side as requests and host slots grow, without an engine"

PARTS = ("idle", "lookup", "memory", "growth")

Told = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    several = partial(parser.add_argument, type=positive, nargs="+")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    several("--tracked", default=[100, 1000, 10_000], help="idle: requests that do nothing in a step")
    parser.add_argument("--pairs", type=positive, default=60, help="idle: windows with few and with many")
    several("--blocks", default=[64, 512, 4096], help="lookup: blocks of the prompts")
    parser.add_argument("--samples", type=positive, default=300, help="lookup: of each length")
    several("--slots", default=[100_000, 1_000_000], help="memory: host slots; 10000000 takes 5 GB")
    parser.add_argument("--requests", type=positive, default=100_000, help="growth: requests in all")
    parser.add_argument(
        "--pool", type=positive, default=100_000, help="growth: host slots, full from the start"
    )
    speeds = Speeds()
    parser.add_argument(
        "--gib-per-s", type=speed, default=speeds.gib_per_s, help="simulated copies, each way"
    )
    parser.add_argument("--block-kib", type=positive, default=speeds.block_kib, help="of a simulated block")
    parser.add_argument("--step-ms", type=speed, default=speeds.step_ms, help="of a simulated engine's step")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for.

    Raises:
        CommandError: a file cannot be written, the run is too short, or there is not enough memory for so many slots.
    """
    if "growth" in args.parts and args.requests < growth.LEAST:
        raise CommandError(f"--requests {args.requests} is too few: at least {growth.LEAST}")
    check_output(args)
    told: Told = {"machine": machine(), "method": method(args)}
    for part in PARTS:
        if part in args.parts:
            say(f"measuring: {part}")
            told[part] = _MEASURES[part](args)
    give_out("scale", told, args, table(told), draw)
    return Exit.OK


def method(args: argparse.Namespace) -> str:
    """Return in a few sentences how it was measured."""
    return (
        f"Real scheduler side, no engine. Copies are simulated: {args.block_kib} KiB a block at {args.gib_per_s:g} GiB/s "
        f"each way, a step every {args.step_ms:g} ms; these are assumed, not measured. Times are of the hooks alone, "
        f"medians [95 % interval] of {args.pairs} interleaved pairs (idle) and {args.samples} samples (lookup); "
        "garbage collection rests meanwhile. Growth: the thread's processor time in hooks. Memory is the resident memory of "
        "fresh processes."
    )


def speed(text: str) -> float:
    """A number above 0, for `type=`."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def say(line: str) -> None:
    """Tell whoever waits; the results alone go to the output."""
    print(line, file=sys.stderr, flush=True)


def _growth(args: argparse.Namespace) -> Told:
    def heard(reading: growth.Reading) -> None:
        say(
            f"  {reading.requests:,} of {args.requests:,} requests, {reading.step_us:,.0f} us in hooks a step"
        )

    speeds = Speeds(args.gib_per_s, args.block_kib, args.step_ms)
    readings = growth.measure(args.requests, args.pool, speeds, heard)
    return {
        "requests": args.requests,
        "pool": args.pool,
        "running": growth.RUNNING,
        "readings": [one.to_plain() for one in readings],
    }


def _plain(cases: Sequence[idle.Idle | lookups.Lookup | memory.Memory]) -> list[Mapping[str, object]]:
    return [case.to_plain() for case in cases]


_MEASURES: dict[str, Callable[[argparse.Namespace], object]] = {
    "idle": lambda args: _plain(idle.measure(args.tracked, args.pairs)),
    "lookup": lambda args: _plain(lookups.measure(args.blocks, args.samples)),
    "memory": lambda args: _plain(memory.measure(args.slots)),
    "growth": _growth,
}
