"""`make mutants`: break one line at a time and see that a test notices."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.mutants.hunt import first_failure, killer, snapshot
from tests.mutants.mutant import Mutant
from tests.mutants.of_rules import MUTANTS


def main() -> int:
    """Hunt every mutant; return 1 where one survives."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--rule", type=int, help="only those of one rule")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.rule in (None, mutant.rule)]
    began = time.monotonic()
    with snapshot() as sources:
        if misfits := [*_misfits(chosen, sources)]:  # known now, not after half of the hunt
            print(*misfits, sep="\n")
            return 1
        tests = sorted(set(itertools.chain.from_iterable(mutant.tests for mutant in chosen)))
        # With a test that fails anyway, every mutant would seem to be killed.
        if (failed := first_failure(sources, tests)) is not None:
            print(f"With nothing broken this fails, see `make test-fast`: {failed}")
            return 1
        killed = _hunt(chosen, sources, options.processes)
    print(f"{time.monotonic() - began:.0f} s")
    print(f"killed {killed} of {len(chosen)}")
    return 0 if killed == len(chosen) else 1


def _misfits(chosen: list[Mutant], sources: Path) -> Iterator[str]:
    """Find the mutants whose line is no longer what they say."""
    for mutant in chosen:
        try:
            mutant.broken(sources)
        except ValueError as misfit:
            yield str(misfit)


def _hunt(chosen: list[Mutant], sources: Path, processes: int) -> int:
    """Print what becomes of each; return how many were killed."""
    killed = 0
    with ThreadPoolExecutor(processes) as pool:
        found = pool.map(partial(killer, sources=sources), chosen)
        for mutant, test in zip(chosen, found, strict=True):
            killed += test is not None
            print(f"killed   {mutant} by {test}" if test else f"SURVIVED {mutant}", flush=True)
    return killed


if __name__ == "__main__":
    sys.exit(main())
