"""`kvoffload report`: shows a journal as one page for any browser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvoffload.cli.exits import CommandError, Exit

HELP = "show a journal as one page with plots, for any browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "journal", metavar="JOURNAL", type=Path, help="what `journal_path` made an engine write"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to (default JOURNAL.html)")


def run(args: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        KVOffloadError: the journal holds nothing that can be read, or the file cannot be written.
    """
    from kvoffload.cli.report.journal import account_of, journal_page
    from kvoffload.cli.report.output import write_page
    from kvoffload.cli.report.page import render

    journal: Path = args.journal
    output: Path = args.output or Path(f"{journal}.html")
    if output.exists() and journal.exists() and output.samefile(journal):
        raise CommandError(f"{output} is the journal itself")
    account, problem = account_of(journal)
    write_page(output, render(journal_page(journal.name, account, problem)))
    print(f"kvoffload: {account.lines} lines of {journal} are in {output}", file=sys.stderr)
    if problem is None:
        return Exit.OK
    print(f"kvoffload: it ends early: {problem}", file=sys.stderr)
    return Exit.FAILED
