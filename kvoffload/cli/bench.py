"""`kvoffload bench NAME`: benches come from entry points, because only adapters may name an engine."""

from __future__ import annotations

import argparse
import ast
import os
import textwrap
from collections.abc import Iterator
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvoffload.cli import signals
from kvoffload.cli.exits import CommandError, Exit, say
from kvoffload.cli.parser import Parser, parse

if TYPE_CHECKING:
    from kvoffload.cli.main import Command

HELP = "measure offloading on an engine"
ENTRY_POINT_GROUP = "kvoffload.benches"
"""Its entry points name modules that are a `Command` each; `NEEDS` in one names the package of its engine."""

_NAMES_WIDTH, _WIDTH = 12, 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of the bench; each has its own options."""
    names = sorted(_found().names)
    parser.add_argument(
        "bench", metavar="NAME", nargs="?", choices=names, help="which bench; without it, a list of them"
    )
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="its options; NAME --help")


def run(args: argparse.Namespace) -> int:
    """Run the named bench, or list them.

    Raises:
        CommandError: the bench cannot be imported, or cannot run as asked.
    """
    if args.bench is None:
        print("\n".join(_listed()))
        return Exit.OK
    with signals.importing():
        bench = _load(args.bench)
    parser = Parser(prog=f"kvoffload bench {args.bench}", description=bench.HELP)
    parser.set_defaults(command=None)
    bench.add_arguments(parser)
    options = parse(parser, {}, args.rest)
    _warn_of_load()
    return int(bench.run(options))


def _warn_of_load() -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        say(f"the machine is busy (load {load:.1f} on {cores} cores): what is measured now is of little use")


def _listed() -> Iterator[str]:
    yield "kvoffload bench NAME [options]; NAME --help lists the options"
    yield ""
    for point in sorted(_found(), key=lambda point: point.name):
        constants = _constants_of(point.module)
        about, needs = constants.get("HELP", "cannot be found"), constants.get("NEEDS")
        if needs is not None and find_spec(needs) is None:
            about += f" (needs {needs}, which is not installed)"
        yield textwrap.fill(
            about, _WIDTH, initial_indent=f"  {point.name:<{_NAMES_WIDTH}}", subsequent_indent=" " * 14
        )


def _constants_of(module: str) -> dict[str, str]:
    """Return a module's texts by name without importing it, which takes seconds where it brings torch."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # of the package
        spec = None
    if spec is None or spec.origin is None:
        return {}
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    return {
        ast.unparse(node.targets[0]): node.value.value
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _found() -> EntryPoints:
    return entry_points(group=ENTRY_POINT_GROUP)


def _load(name: str) -> Command:
    try:
        return cast("Command", _found()[name].load())
    except ImportError as error:
        raise CommandError(f"the bench {name!r} cannot be imported: {error}") from error
