"""`kvoffload bench NAME`: benches come from the adapters, found by entry point, because only they may name an engine."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kvoffload.cli.main import Command

HELP = "measure offloading on an engine"
ENTRY_POINT_GROUP = "kvoffload.benches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a bench, with its own options."""
    benches = parser.add_subparsers(title="benches", dest="bench", metavar="NAME", required=True)
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        bench = cast("Command", entry.load())
        options = benches.add_parser(entry.name, help=bench.HELP, description=bench.HELP)
        bench.add_arguments(options)
        options.set_defaults(run_bench=bench.run)


def run(args: argparse.Namespace) -> int:
    """Run the bench that was named."""
    return int(args.run_bench(args))
