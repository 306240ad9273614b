"""`kvoffload timeline`: turns a journal into a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from kvoffload.cli import signals
from kvoffload.cli.journal_lines import Lines, add_journal_argument, part_of
from kvoffload.cli.partial_file import STDOUT, written

HELP = "write a journal as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_journal_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help='where to; "-" for standard output (default: JOURNAL.trace.json)',
    )


def run(args: argparse.Namespace) -> int:
    """Write the trace.

    Raises:
        KVOffloadError: the journal holds nothing that can be read, or the file cannot be written.
    """
    with signals.importing():
        from kvoffload.telemetry.timeline import draw
        from kvoffload.telemetry.trace import render

    output, lines = args.output or Path(f"{args.journal}.trace.json"), Lines(args.journal, part_of(args))
    lines.check_is_other(output)
    records = iter(lines)
    first = next(records)  # fails before the file is created
    # Private, as the journal is.
    with written(output, is_private=True) as file:
        file.writelines(render(draw(chain([first], records)), lambda: lines.provenance))
    return lines.report("standard output" if output == STDOUT else output)
