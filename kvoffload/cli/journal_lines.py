"""What the commands that show a journal have in common: its lines as far as they can be read, and where the result goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.exits import CommandError, Exit

if TYPE_CHECKING:
    from kvoffload.telemetry.journal import JournalError, Record


def add_journal_argument(parser: argparse.ArgumentParser) -> None:
    """Add the journal, by which `Lines` is made."""
    parser.add_argument(
        "journal", metavar="JOURNAL", type=Path, help="what `journal_path` made an engine write"
    )


class Lines:
    """Reads a journal up to what cannot be read: a running engine's last line may be cut off.

    Args:
        path: of the journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.problem: JournalError | None = None
        """What ended it early."""

    def __iter__(self) -> Iterator[Record]:
        """Yield the lines.

        Raises:
            KVOffloadError: there is none that can be read.
        """
        from kvoffload.telemetry.journal import JournalError, read_journal

        try:
            for record in read_journal(self._path):
                self.count += 1
                yield record
        except JournalError as error:
            if not self.count:
                raise
            self.problem = error
        if not self.count:
            raise CommandError(f"{self._path} is empty: the engine has not told anything yet")

    def check_is_other(self, output: Path) -> None:
        """Make sure that the result does not take the journal's place.

        Raises:
            CommandError: it would.
        """
        if output.exists() and self._path.exists() and output.samefile(self._path):
            raise CommandError(f"{output} is the journal itself")

    def tell(self, where: object) -> int:
        """Say how much of the journal is where, and return the command's exit code."""
        print(f"kvoffload: {self.count} lines of {self._path} are in {where}", file=sys.stderr)
        if self.problem is None:
            return Exit.OK
        print(f"kvoffload: it ends early: {self.problem}", file=sys.stderr)
        return Exit.FAILED
