"""What the demo prints."""

from __future__ import annotations

import sys

from kvoffload.cli.exits import print_error, say

_CLEAR_LINE = "\r\x1b[K"


class Screen:
    """Prints results to standard output and messages to standard error. Shows progress if the latter is a terminal.

    Args:
        quiet: True to hide progress even on a terminal.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._clear = _CLEAR_LINE if sys.stderr.isatty() and not quiet else ""

    def progress(self, text: str) -> None:
        """Replace the progress line on the terminal."""
        if self._clear:
            print_error(f"{self._clear}{text}", end="")

    def say(self, text: str) -> None:
        """Print a message to standard error."""
        print_error(self._clear, end="")
        say(text)

    def result(self, text: str) -> None:
        print_error(self._clear, end="")
        print(text, flush=True)
