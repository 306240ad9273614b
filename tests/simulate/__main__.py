"""`make simulate`: runs seeds, and prints how to reproduce each failure.

The last line is `seeds N, failures N`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvoffload.checks.options import positive
from tests.simulate.campaign import Result, keep_journal, play_all
from tests.simulate.scenario import draw

_SEEDS = 10_000
_FOLDER = Path(".venv/simulate")


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    began = time.perf_counter()
    results = _play_one(args) if args.seed is not None else _play_many(args)
    done, failures, total = 0, 0, Counter[str]()
    for result in results:
        done += 1
        total += result.numbers
        failures += result.problem is not None
        if sys.stderr.isatty() and done % 10 == 0:
            print(f"\r{done} seeds, {failures} failures ", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    numbers = ", ".join(f"{name} {number}" for name, number in sorted(total.items()))
    print(f"{numbers}, in {time.perf_counter() - began:.0f} s")
    print(f"seeds {done}, failures {failures}")
    return 1 if failures else 0


def _play_one(args: argparse.Namespace) -> Iterator[Result]:
    print(draw(args.seed))
    journal, result = keep_journal(args.seed, args.journals)
    print(f"journal: {journal}")
    print(result.trace, end="")
    yield result


def _play_many(args: argparse.Namespace) -> Iterator[Result]:
    for result in play_all(range(args.first, args.first + args.seeds), args.processes):
        if result.problem:
            _show(result, args.journals)
        yield result


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=positive, default=_SEEDS, help=f"how many (default {_SEEDS})")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="run only this seed, and print its journal's path")
    parser.add_argument("--processes", type=positive, help="default: one for each core")
    parser.add_argument("--journals", type=Path, default=_FOLDER, help="the folder for journals")
    return parser.parse_args(argv)


def _show(result: Result, folder: Path) -> None:
    journal, again = keep_journal(result.seed, folder)
    print(f"seed {result.seed} failed: {result.problem}", flush=True)
    print(f'  again:   make simulate ARGS="--seed {result.seed}"')
    print(f"  journal: {journal}")
    if again.problem != result.problem:
        print(f"  the second run ended differently: {again.problem}")
    print("".join(f"  | {line}\n" for line in result.trace.splitlines()[-12:]), end="")


if __name__ == "__main__":
    sys.exit(main())
