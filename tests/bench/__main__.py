"""`make bench-NAME` runs a bench of this folder; `make bench-NAME ARGS=--help` lists its options."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from kvoffload.cli.exits import Exit, say
from kvoffload.model.errors import KVOffloadError

BENCHES = (
    "copy",
    "disk",
    "engine",
    "fs",
    "hicache",
    "hints",
    "hooks",
    "instructions",
    "loads",
    "node",
    "policies",
    "queue",
    "remote",
    "restart",
    "scale",
    "serve",
    "trace",
    "verify",
    "worker",
)
"""Each name is a module of this folder with the functions `add_arguments(parser)` and `run(options)`."""


def main(argv: Sequence[str] | None = None) -> int:
    name, *rest = sys.argv[1:] if argv is None else argv
    if name not in BENCHES:
        say(f"error: there is no bench {name!r}; choose from {', '.join(BENCHES)}")
        return Exit.USAGE
    bench = importlib.import_module(f"tests.bench.{name}")
    parser = argparse.ArgumentParser(
        prog=f"make bench-{name}",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_arguments(parser)
    options = parser.parse_args(rest)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        say(f"the machine is busy (load {load:.1f} on {cores} cores): figures taken now are of little use")
    try:
        return int(bench.run(options))
    except KVOffloadError as error:
        say(f"error: {error}")
        return Exit.USAGE


if __name__ == "__main__":
    sys.exit(main())
