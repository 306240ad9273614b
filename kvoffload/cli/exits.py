"""Exit codes, lines on standard error, and errors that end a command with one line."""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import IntEnum

from kvoffload.model.errors import KVOffloadError


class Exit(IntEnum):
    """Exit codes. The last three are what shells report of a process that the signal ended."""

    OK = 0
    FAILED = 1  # the command ran, and found or did something wrong
    USAGE = 2  # it cannot run as asked
    MISSED = 3  # all that was checked is right, and a goal was missed
    OUTPUT = 74  # output cannot be written; sysexits.h calls it EX_IOERR
    HUNG_UP = 129  # SIGHUP: the terminal was closed
    INTERRUPTED = 130  # SIGINT: Ctrl-C
    TERMINATED = 143  # SIGTERM


class CommandError(KVOffloadError):
    """Raised when a command cannot do what was asked. The message is in the words of the command line."""


class OutputError(CommandError):
    """Raised when a file cannot be written; what it held before is still there.

    Args:
        target: its name.
        error: the reason.
    """

    def __init__(self, target: object, error: OSError) -> None:
        super().__init__(f"{target} cannot be written: {error.strerror or error}")


def say(text: str) -> None:
    """Print a line that is not a result, with the command's name before it."""
    print_error(f"kvoffload: {printable(text)}")


def printable(text: str) -> str:
    """Return text that a terminal only shows.

    Names of files, journals, models and servers may hold escapes, line ends, or bytes that are not UTF-8.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def print_error(text: str, end: str = "\n") -> None:
    """Print to standard error. Where that cannot be written, the text is lost and the command continues."""
    with suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)
