"""Measures what one rank's copies cost the engine's thread, and the event loop, on a CPU.

With `--beside DIR`, a process of this checkout and one of the other take turns, so that other load on the machine affects
both. The ratios of the turns then say more than the times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from kvoffload.checks.options import positive
from tests.bench.beside import CHECKOUT, add_beside_argument, running
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out

FIGURES = {
    "store_us": ("the hooks of a step that starts a store of 8 blocks", " us"),
    "load_us": ("a load of 8 blocks, until the engine knows that it has ended", " us"),
    "wakes": ("wakes of the event loop's thread for each such store", ""),
}
"""What `worker_steps.py` measures, in words, and the units."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_beside_argument(parser)
    parser.add_argument("--turns", type=positive, default=40, help="turns of each checkout")
    parser.add_argument("--page-kib", type=positive, default=16, help="size of a block's 8 pieces")
    parser.add_argument("--steps", type=positive, default=10, help="steps of each kind in a turn")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    method = (
        f"{args.turns} turns, after one to warm up; in each the medians of {args.steps} steps, 10 ms apart; blocks of 8 "
        f"pieces of {args.page_kib} KiB; median over the turns, ratios turn by turn [95 % interval]"
    )
    return give_out("worker", args, method, _measure(args))


def _measure(args: argparse.Namespace) -> Iterator[Line]:
    checkouts = [CHECKOUT] if args.beside is None else [CHECKOUT, args.beside]
    found: list[list[Mapping[str, float]]] = [[] for _ in checkouts]
    options = [str(args.steps), str(args.page_kib)]
    with ExitStack() as stack:
        asks = [stack.enter_context(running("worker_steps.py", options, each)) for each in checkouts]
        turns = list(zip(asks, found, strict=True))
        for _ in range(1 + args.turns):
            for ask, results in turns:
                results.append(json.loads(ask()))
            turns.reverse()
    yield from lines(*(results[1:] for results in found))


def lines(mine: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]] = ()) -> Iterator[Line]:
    """Yield each figure and, beside another build, its ratio to the other build's figure."""
    for name, (what, unit) in FIGURES.items():
        yield line(what, [one[name] for one in mine], unit)
        if other:
            both = ([one[name] for one in results] for results in (mine, other))
            yield line(f"{what}, over the other build", ratios(*both))
