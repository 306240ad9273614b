"""What goes where: results to standard output; everything else to standard error, progress only if that is a terminal."""

from __future__ import annotations

import sys

_CLEAR_LINE = "\r\x1b[K"


class Screen:
    """The command's two streams.

    Args:
        quiet: show no progress.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._shows_progress = sys.stderr.isatty() and not quiet
        self._is_dirty = False

    def progress(self, text: str) -> None:
        """Show what is going on, in place of what was shown before."""
        if self._shows_progress:
            print(f"{_CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
            self._is_dirty = True

    def say(self, text: str) -> None:
        """Tell something that is no result."""
        self.tell(f"kvoffload: {text}")

    def tell(self, text: str) -> None:
        """The same as it stands, for what belongs to the line before."""
        self._clear()
        print(text, file=sys.stderr, flush=True)

    def result(self, text: str) -> None:
        """Print a result."""
        self._clear()
        print(text, flush=True)

    def _clear(self) -> None:
        if self._is_dirty:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
            self._is_dirty = False
