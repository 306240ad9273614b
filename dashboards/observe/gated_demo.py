"""The demo that `run_demo` starts in another process. Before it begins, it waits for a line on standard input.

`run_demo` starts this file by its path, because the package `dashboards` is not installed.
"""

from __future__ import annotations

import sys

from kvoffload.cli import main
from kvoffload.cli.demo import command

SERVES = "metrics are at "


class GatedScreen(command.Screen):
    """A screen that waits for a line on standard input when the demo says that it serves metrics."""

    def say(self, text: str) -> None:
        """Print a message that is not a result."""
        super().say(text)
        if text.startswith(SERVES):
            sys.stdin.readline()


if __name__ == "__main__":
    command.Screen = GatedScreen  # type: ignore[misc]
    sys.exit(main.main(["demo", *sys.argv[1:]]))
