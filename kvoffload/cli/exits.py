"""Exit codes, messages on standard error, and the errors that end a command with one line."""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import IntEnum

from kvoffload.model.errors import KVOffloadError


class Exit(IntEnum):
    """Exit codes. The last three are the codes that shells report for a process ended by SIGHUP, SIGINT or SIGTERM."""

    OK = 0
    FAILED = 1  # the command ran, but found a problem or failed
    USAGE = 2  # the command cannot run as asked
    MISSED = 3  # every result is correct, but a goal was missed
    OUTPUT = 74  # output cannot be written; sysexits.h calls it EX_IOERR
    HUNG_UP = 129  # SIGHUP: the terminal was closed
    INTERRUPTED = 130  # SIGINT: Ctrl-C
    TERMINATED = 143  # SIGTERM


class CommandError(KVOffloadError):
    """Raised when a command cannot run as asked. The message uses the command line's terms."""


class OutputError(CommandError):
    """Raised when a file cannot be written. The file's earlier content is still there.

    Args:
        target: the file's name.
        error: the reason.
    """

    def __init__(self, target: object, error: OSError) -> None:
        super().__init__(f"{target} cannot be written: {error.strerror or error}")


def say(text: str) -> None:
    """Print a message to standard error, after the command's name."""
    print_error(f"kvoffload: {printable(text)}")


def printable(text: str) -> str:
    """Replace the characters that a terminal would interpret instead of showing.

    Names of files, journals, models and servers may contain escapes, line ends, or bytes that are not UTF-8.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def print_error(text: str, end: str = "\n") -> None:
    """Print to standard error. If that fails, the text is lost and the command continues."""
    with suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)
