"""`kvoffload bench NAME`: benches come from entry points, as only adapters may name an engine. None is imported to list it."""

from __future__ import annotations

import argparse
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, cast

from kvoffload.cli.exits import CommandError
from kvoffload.cli.parser import Parser, parse

if TYPE_CHECKING:
    from kvoffload.cli.main import Command

HELP = "measure offloading on an engine"
ENTRY_POINT_GROUP = "kvoffload.benches"
"""Its entry points name modules that are a `Command` each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The names of the benches; each has its own options."""
    names = sorted(_found().names)
    parser.add_argument("bench", metavar="NAME", choices=names, help=f"one of: {', '.join(names) or 'none'}")
    rest = parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="its options; NAME --help"
    )
    rest.required = False  # it never is, but an error would name it beside the bench


def run(args: argparse.Namespace) -> int:
    """Run the bench that was named.

    Raises:
        CommandError: the bench cannot be imported, or not run as asked.
    """
    bench = _load(args.bench)
    parser = Parser(prog=f"kvoffload bench {args.bench}", description=bench.HELP)
    parser.set_defaults(command=None)
    bench.add_arguments(parser)
    return int(bench.run(parse(parser, {}, args.rest)))


def _found() -> EntryPoints:
    return entry_points(group=ENTRY_POINT_GROUP)


def _load(name: str) -> Command:
    try:
        return cast("Command", _found()[name].load())
    except ImportError as error:
        raise CommandError(f"the bench {name!r} cannot be imported: {error}") from error
