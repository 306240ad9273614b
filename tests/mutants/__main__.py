"""`make mutants`: break one line at a time and see that a test notices."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.hunt import is_killed, survive_unbroken
from tests.mutants.of_rules import MUTANTS


def main() -> int:
    """Hunt every mutant; return 1 where one survives."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--rule", type=int, help="only those of one rule")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.rule in (None, mutant.rule)]
    tests = sorted(set(itertools.chain.from_iterable(mutant.tests for mutant in chosen)))
    began = time.monotonic()
    if not survive_unbroken(tests):
        print("The tests fail with nothing broken: see `make test-fast`.")
        return 1
    killed = 0
    with ThreadPoolExecutor(options.processes) as pool:
        for mutant, is_dead in zip(chosen, pool.map(is_killed, chosen), strict=True):
            killed += is_dead
            print(f"{'killed  ' if is_dead else 'SURVIVED'} {mutant}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    print(f"killed {killed} of {len(chosen)}")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
