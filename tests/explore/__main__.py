"""`make explore`: explores every small world in several processes, and prints the results."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.explore.search import Found, explore
from tests.explore.worlds import WORLDS

STATES = 50_000


def main() -> int:
    options = _options()
    began = time.monotonic()
    found = list[Found]()
    names = options.worlds or list(WORLDS)
    # Each world runs in a process of its own, because its states take some hundred megabytes.
    with multiprocessing.Pool(min(options.processes, len(names)), maxtasksperchild=1) as pool:
        tasks = [(name, options.states) for name in names]
        for name, seen in pool.imap_unordered(_explore, tasks, chunksize=1):
            found.append(seen)
            print(_line(name, seen), flush=True)
            if seen.violation is not None:
                print(f"\n{seen.violation.problem}\n\n{seen.violation.as_test(name)}", flush=True)
    violations = sum(seen.violation is not None for seen in found)
    states, transitions = sum(seen.states for seen in found), sum(seen.transitions for seen in found)
    ends = sum(seen.ends for seen in found)
    print(f"{time.monotonic() - began:.0f} s; {ends} of the states were run to their end")
    print(f"states {states}, transitions {transitions}, violations {violations}")
    return 1 if violations else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make explore", description=__doc__)
    parser.add_argument("worlds", nargs="*", choices=[[], *WORLDS], help="which worlds; by default all")
    parser.add_argument("--states", type=int, default=STATES, help="states a world (default %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="worlds at a time")
    return parser.parse_args()


def _explore(task: tuple[str, int]) -> tuple[str, Found]:
    name, states = task
    return name, explore(WORLDS[name], states=states)


def _line(name: str, seen: Found) -> str:
    end = "all there are" if seen.is_exhausted else f"programs of up to {seen.depth} actions"
    return f"{name:22} {seen.states:8} states {seen.transitions:9} transitions, {end}"


if __name__ == "__main__":
    sys.exit(main())
