"""The demo that `run_demo` starts as a separate process. It waits for a line on standard input before it begins.

`run_demo` starts this file by its path, because the package is not installed.
"""

from __future__ import annotations

import sys

from kvoffload.cli import main
from kvoffload.cli.demo import command

SERVES = "metrics are at "


class GatedScreen(command.Screen):
    """A screen that waits for the line once metrics are served."""

    def say(self, text: str) -> None:
        """Print a line that is not a result."""
        super().say(text)
        if text.startswith(SERVES):
            sys.stdin.readline()


if __name__ == "__main__":
    command.Screen = GatedScreen  # type: ignore[misc]
    sys.exit(main.main(["demo", *sys.argv[1:]]))
