"""`kvoffload timeline`: turns a journal into a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

from kvoffload.cli.journal_lines import Lines, add_journal_argument
from kvoffload.cli.partial_file import written

HELP = "write a journal as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing"
_STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_journal_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help='where to (default JOURNAL.trace.json; "-" for standard output)',
    )


def run(args: argparse.Namespace) -> int:
    """Write the trace.

    Raises:
        KVOffloadError: the journal holds nothing that can be read, or the file cannot be written.
    """
    from kvoffload.telemetry.timeline import draw
    from kvoffload.telemetry.trace import render

    output, lines = args.output or f"{args.journal}.trace.json", Lines(args.journal)
    is_file = output != _STDOUT
    if is_file:
        lines.check_is_other(Path(output))
    records = iter(lines)
    first = next(records)  # before there is a file
    # Its owner's alone, as the journal is.
    with written(Path(output), is_private=True) if is_file else nullcontext(sys.stdout) as file:
        file.writelines(render(draw(chain([first], records))))
    return lines.tell(output if is_file else "standard output")
