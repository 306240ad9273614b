"""Measures lookups, and the memory per host slot, in the real `SchedulerSide` without an engine or copies."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from kvoffload.checks.options import positive
from tests.bench import lookups, memory
from tests.bench.lines import Line
from tests.bench.results import add_output_arguments, give_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several = partial(parser.add_argument, type=positive, nargs="+")
    several("--blocks", default=[64, 512, 4096], help="blocks of the prompts that are looked up")
    parser.add_argument("--samples", type=positive, default=300, help="lookups of each length")
    several("--slots", default=[100_000, 1_000_000], help="host slots; 10000000 takes 5 GB")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    method = (
        f"Real scheduler side, no engine. Times are of the hooks alone, medians [95 % interval] of {args.samples} samples; garbage "
        "collection rests meanwhile. Memory is the resident memory of fresh processes."
    )
    return give_out("scale", args, method, _measure(args))


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    yield from lookups.measure(args.blocks, args.samples)
    yield from memory.measure(args.slots)
