"""What every bench does with its results: prints a table or JSON, and on request keeps them and draws them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvoffload.bench.results import headline, save
from kvoffload.cli.report.output import check_writable, write_page


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check_output` and `give_out` read."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the results into FILE, as SVG")
    parser.add_argument("--save", metavar="DIR", type=Path, help="write the results into DIR, as JSON, too")


def check_output(args: argparse.Namespace) -> None:
    """Find out now, and not after minutes, whether the picture can be written.

    Raises:
        CommandError: it cannot.
    """
    if args.plot is not None:
        check_writable(args.plot)


def heading(title: str, told: Mapping[str, Any], *notes: str) -> Iterator[str]:
    """Yield the head of a table: what it shows, on which machine, how it was measured, notes, and an empty line."""
    yield title
    for line in (headline(told["machine"]), told["method"], *notes):
        yield f"  {line}"
    yield ""


def give_out(
    name: str,
    told: Mapping[str, Any],
    args: argparse.Namespace,
    table: Iterable[str],
    draw: Callable[[Mapping[str, Any]], str],
) -> None:
    """Print, keep and draw what a bench found, as far as was asked for.

    Args:
        name: the bench's.
        told: what it found, JSON-like.
        args: of `add_output_arguments`.
        table: the lines to print, made only where they are.
        draw: makes an SVG of `told`.

    Raises:
        CommandError: a file cannot be written.
    """
    if args.save is not None:
        print(f"written: {save(name, told, args.save)}", file=sys.stderr)
    if args.plot is not None:
        write_page(args.plot, draw(told))
    print(json.dumps(told, indent=1) if args.json else "\n".join(table))
