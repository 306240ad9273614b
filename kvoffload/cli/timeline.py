"""`kvoffload timeline`: turns a journal into a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.partial_file import complete, open_partial

if TYPE_CHECKING:
    from kvoffload.telemetry.journal import JournalError, Record

HELP = "write a journal as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing"
_STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "journal", metavar="JOURNAL", type=Path, help="what `journal_path` made an engine write"
    )
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

    journal: Path = args.journal
    output: str = args.output or f"{journal}.trace.json"
    if output != _STDOUT and Path(output).exists() and Path(output).samefile(journal):
        raise CommandError(f"{output} is the journal itself")
    lines = _Lines(journal)
    records = lines.read()
    first = next(records, None)
    if first is None:
        raise lines.problem or CommandError(f"{journal} is empty: the engine has not told anything yet")
    with _open(output) as file:
        file.writelines(render(draw(chain([first], records))))
    where = "standard output" if output == _STDOUT else output
    print(f"kvoffload: {lines.count} lines of {journal} are in {where}", file=sys.stderr)
    if lines.problem is None:
        return Exit.OK
    print(f"kvoffload: it ends early: {lines.problem}", file=sys.stderr)
    return Exit.FAILED


class _Lines:
    """Reads a journal up to what cannot be read: a running engine's last line may be cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.problem: JournalError | None = None

    def read(self) -> Iterator[Record]:
        from kvoffload.telemetry.journal import JournalError, read_journal

        try:
            for record in read_journal(self._path):
                self.count += 1
                yield record
        except JournalError as error:
            self.problem = error


@contextmanager
def _open(output: str) -> Iterator[TextIO]:
    """A file that appears under its name only when it is complete; its owner's alone, as the journal is."""
    if output == _STDOUT:
        yield sys.stdout
        return
    target, partial = Path(output), None
    try:
        descriptor, partial = open_partial(target)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
        complete(partial, target)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()
