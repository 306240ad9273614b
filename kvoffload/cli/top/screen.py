"""A terminal for a page that is redrawn: rich draws, single keys are read here."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from kvoffload.cli import signals


class Terminal:
    """The terminal of standard input and output, for as long as a `with` block lasts."""

    def __init__(self) -> None:
        self._console = Console(markup=False, emoji=False)
        self._input = sys.stdin.fileno()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._stack = ExitStack()

    def wake(self) -> None:
        """Make `wait` return. From any thread."""
        try:
            os.write(self._wake, b".")
        except OSError:  # it is awake already, or closed
            return

    def wait(self, timeout_s: float | None = None) -> str:
        """Return a key, or nothing once woken or after the time-out."""
        ready, _, _ = select.select([self._input, self._woken], [], [], timeout_s)
        if self._woken in ready:
            os.read(self._woken, 1024)
        if self._input not in ready:
            return ""
        # An end of the input means that the terminal is closed.
        return os.read(self._input, 64).decode(errors="replace") or "q"

    @property
    def width(self) -> int:
        return self._console.width

    @property
    def height(self) -> int:
        return self._console.height

    def draw(self, page: RenderableType) -> None:
        """Show this page in place of the last one."""
        self._screen.update(page)

    def __enter__(self) -> Self:
        before = termios.tcgetattr(self._input)
        self._stack.callback(termios.tcsetattr, self._input, termios.TCSADRAIN, before)
        self._stack.enter_context(signals.undone_on_exit(partial(_restore, self._input, before)))
        tty.setcbreak(self._input)  # keys at once, while Ctrl-C still interrupts
        self._screen = self._stack.enter_context(self._console.screen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _restore(terminal: int, before: list[Any]) -> None:
    """Leave the alternate screen, show the cursor, and echo again."""
    with suppress(OSError, termios.error):
        termios.tcsetattr(terminal, termios.TCSANOW, before)
        os.write(1, b"\x1b[?1049l\x1b[?25h")


class Scrolled:
    """A page of which a part is shown, between a line at the top and one at the bottom.

    Args:
        head: the first line.
        body: makes the page for a width.
        offset: lines of the body that were scrolled past.
        keys: for the last line.
    """

    def __init__(self, head: str, body: Callable[[int], RenderableType], offset: int, keys: str) -> None:
        self._head, self._body, self._keys = head, body, keys
        self.offset = offset

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or options.max_height
        lines = console.render_lines(self._body(width), options.update(height=None), pad=False)
        room = max(height - 2, 1)
        self.offset = min(self.offset, max(len(lines) - room, 0))
        below = max(len(lines) - room - self.offset, 0)
        more = f"{below} more lines below; " if below else ""
        yield Text(self._head, "bold", no_wrap=True, overflow="ellipsis")
        for line in lines[self.offset : self.offset + room]:
            yield from line
            yield Segment.line()
        yield Text(f"{more}{self._keys}", "dim", no_wrap=True, overflow="ellipsis", end="")
