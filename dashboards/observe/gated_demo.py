"""The program that `run_demo` starts: a demo that waits for a line on standard input before the conversations begin.

`run_demo` starts this file by its path, because the package `dashboards` is not installed.
"""

from __future__ import annotations

import sys

from kvoffload.cli import main
from kvoffload.cli.demo import command
from kvoffload.cli.demo.screen import Screen

SERVES = "metrics are at "


class GatedScreen(Screen):
    """A screen that waits for a line on standard input after the demo's message about its metrics."""

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith(SERVES):
            sys.stdin.readline()


if __name__ == "__main__":
    command.Screen = GatedScreen  # type: ignore[attr-defined]
    sys.exit(main.main(["demo", *sys.argv[1:]]))
