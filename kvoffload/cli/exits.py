"""Exit codes, messages on standard error, and the errors that a command reports in one line."""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import IntEnum

from kvoffload.model.errors import KVOffloadError


class Exit(IntEnum):
    """Exit codes. Shells report the last three for a process that SIGHUP, SIGINT or SIGTERM ended."""

    OK = 0
    FAILED = 1  # the command ran, and then failed or found a problem
    USAGE = 2  # the command cannot run as asked
    MISSED = 3  # every result is correct, but a performance goal was missed
    OUTPUT = 74  # output cannot be written; the number is EX_IOERR of sysexits.h
    HUNG_UP = 129  # SIGHUP: the terminal was closed
    INTERRUPTED = 130  # SIGINT: Ctrl-C
    TERMINATED = 143  # SIGTERM


class CommandError(KVOffloadError):
    """Raised when a command cannot run as asked. The message names the options to change."""


class OutputError(CommandError):
    """Raised when a file cannot be written. Its earlier content is unchanged.

    Args:
        target: the name of the file.
        error: why writing failed.
    """

    def __init__(self, target: object, error: OSError) -> None:
        super().__init__(f"{target} cannot be written: {error.strerror or error}")


def say(text: str) -> None:
    """Print "kvoffload: " and a message to standard error."""
    print_error(f"kvoffload: {printable(text)}")


def printable(text: str) -> str:
    """Replace everything that a terminal might interpret: control characters, and bytes that are not UTF-8.

    The names of files, models and servers may contain them.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def print_error(text: str, end: str = "\n") -> None:
    """Print to standard error. If that fails, the text is lost and the command continues."""
    with suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)
