"""`kvoffload report`: shows a journal as one page for any browser."""

from __future__ import annotations

import argparse

from kvoffload.cli import signals
from kvoffload.cli.journal_lines import add_journal_arguments, opened
from kvoffload.cli.partial_file import written

HELP = "show a journal as one page with figures, for any browser; needs the extra kvoffload[report]"

_SUFFIX = ".html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_journal_arguments(parser, _SUFFIX)


def run(args: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        KVOffloadError: matplotlib is not installed, the journal holds nothing that can be read, or the file cannot be written.
    """
    with signals.importing():
        from kvoffload.cli.report.account import add_up
        from kvoffload.cli.report.figures import check_installed
        from kvoffload.cli.report.page import render

    check_installed()
    lines, output = opened(args, _SUFFIX)
    account = add_up(lines)
    # The page holds counts, sizes and times, and names no request, so it need not be private.
    with written(output) as file:
        file.write(render(account, lines))
    return lines.report(output)
