"""`kvoffload bench scale`: the scheduler's side with many requests and slots, without an engine, copies simulated.

Three parts: idle requests, lookups, and memory of slots. Each is measured on the real `SchedulerSide`; only the engine around it
and the copies are not there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

from kvoffload.bench.lines import Line
from kvoffload.bench.results import add_output_arguments, give_out
from kvoffload.bench.scale import idle, lookups, memory
from kvoffload.bench.scale.engineless import BLOCK_KIB, GIB_PER_S, STEP_S
from kvoffload.cli.parser import positive

HELP = "the scheduler's side as requests and host slots grow, without an engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's options."""
    several = partial(parser.add_argument, type=positive, nargs="+")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="what is measured")
    several("--tracked", default=[100, 1000, 10_000], help="idle: requests that do nothing in a step")
    parser.add_argument("--pairs", type=positive, default=60, help="idle: windows with few and with many")
    several("--blocks", default=[64, 512, 4096], help="lookup: blocks of the prompts")
    parser.add_argument("--samples", type=positive, default=300, help="lookup: of each length")
    several("--slots", default=[100_000, 1_000_000], help="memory: host slots; 10000000 takes 5 GB")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for.

    Raises:
        CommandError: a file cannot be written, or there is not enough memory for so many slots.
    """
    method = (
        f"Real scheduler side, no engine. Copies are simulated: {BLOCK_KIB} KiB a block at {GIB_PER_S:g} GiB/s each way, a "
        f"step every {1e3 * STEP_S:g} ms; these are assumed, not measured. Times are of the hooks alone, medians [95 % "
        f"interval] of {args.pairs} interleaved pairs (idle) and {args.samples} samples (lookup); garbage collection rests "
        "meanwhile. Memory is the resident memory of fresh processes."
    )
    return give_out("scale", args, method, _measure(args))


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    for part, measure in _PARTS.items():
        if part in args.parts:
            print(f"measuring: {part}", file=sys.stderr, flush=True)
            yield from measure(args)


_PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Line]]] = {
    "idle": lambda args: idle.measure(args.tracked, args.pairs),
    "lookup": lambda args: lookups.measure(args.blocks, args.samples),
    "memory": lambda args: memory.measure(args.slots),
}
