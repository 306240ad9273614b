"""`kvoffload report`: shows a journal as one page for any browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvoffload.cli import signals
from kvoffload.cli.journal_lines import Lines, add_journal_argument, part_of
from kvoffload.cli.partial_file import STDOUT, written

HELP = "show a journal as one page with plots, for any browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_journal_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help='where to; "-" for standard output (default: JOURNAL.html)',
    )


def run(args: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        KVOffloadError: the journal holds nothing that can be read, or the file cannot be written.
    """
    with signals.importing():
        from kvoffload.cli.report.account import add_up
        from kvoffload.cli.report.journal import journal_page
        from kvoffload.cli.report.page import render

    output, lines = args.output or Path(f"{args.journal}.html"), Lines(args.journal, part_of(args))
    lines.check_is_other(output)
    account = add_up(lines)
    # The page holds counts, sizes and times, and names no request, so it need not be private.
    with written(output) as file:
        file.write(render(journal_page(account, lines)))
    return lines.report("standard output" if output == STDOUT else output)
