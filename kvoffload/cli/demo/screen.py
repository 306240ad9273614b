"""Output of the demo: results to standard output, the rest to standard error, progress only if that is a terminal."""

from __future__ import annotations

import sys

from kvoffload.cli.exits import print_error, say

_CLEAR_LINE = "\r\x1b[K"


class Screen:
    """The command's two streams.

    Args:
        quiet: show no progress.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._shows_progress = sys.stderr.isatty() and not quiet
        self._has_progress = False

    def progress(self, text: str) -> None:
        """Show what is going on, in place of the last progress."""
        if self._shows_progress:
            print_error(f"{_CLEAR_LINE}{text}", end="")
            self._has_progress = True

    def say(self, text: str) -> None:
        """Print a line that is not a result."""
        self._clear()
        say(text)

    def detail(self, text: str) -> None:
        """Print a line that belongs to the one before."""
        self._clear()
        print_error(text)

    def result(self, text: str) -> None:
        """Print a result."""
        self._clear()
        print(text, flush=True)

    def _clear(self) -> None:
        if self._has_progress:
            print_error(_CLEAR_LINE, end="")
            self._has_progress = False
