"""A terminal: a page that is drawn over the last one, single keys, and everything as it was at the end."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvoffload.cli.top.view import Line

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[0m"


class Terminal:
    """The terminal of standard input and output, for as long as a `with` block lasts."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._has_colours = "NO_COLOR" not in os.environ
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def wake(self) -> None:
        """Make `wait` return. From any thread."""
        try:
            os.write(self._wake, b".")
        except OSError:  # it is awake already, or gone
            return

    def wait(self, timeout_s: float | None = None) -> str:
        """Return a key, or nothing once woken or when the time is over."""
        ready, _, _ = select.select([self._input, self._woken], [], [], timeout_s)
        if self._woken in ready:
            os.read(self._woken, 1024)
        if self._input not in ready:
            return ""
        # An end of the input means that the terminal is gone.
        return os.read(self._input, 64).decode(errors="replace") or "q"

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines and nothing else; what does not fit is left out, empty lines first."""
        columns, rows = shutil.get_terminal_size()
        if len(lines) >= rows:
            lines = [line for line in lines if line.text]
        shown = [self._painted(line, columns) for line in lines[: max(rows - 1, 1)]]
        page = "".join(f"{text}{_CLEAR_LINE}\r\n" for text in shown)
        sys.stdout.write(f"{_HOME}{page}{_CLEAR_BELOW}")
        sys.stdout.flush()

    def _painted(self, line: Line, columns: int) -> str:
        # A server's words may be anything, also orders to a terminal.
        text = "".join(letter if letter.isprintable() else "?" for letter in line.text[:columns])
        if not self._has_colours or not (line.heading or line.alarm):
            return text
        return f"{_RED if line.alarm else _BOLD}{text}{_PLAIN}"

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._input)
        tty.setcbreak(self._input)  # keys at once, while Ctrl-C still interrupts
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
