"""Exit codes, messages on standard error, and the errors that a command reports in one line."""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import IntEnum

from kvoffload.model.errors import KVOffloadError, printable


class Exit(IntEnum):
    """Exit codes. For a process that a signal ends, the code is 128 plus the signal's number, as in shells."""

    OK = 0
    FAILED = 1  # the command ran, and failed or found a problem
    USAGE = 2  # the command cannot run with its options and settings
    MISSED = 3  # every result is correct, but a performance goal was missed
    OUTPUT = 74  # output cannot be written; EX_IOERR in sysexits.h
    HUNG_UP = 129  # SIGHUP: the terminal was closed
    INTERRUPTED = 130  # SIGINT: Ctrl-C
    TERMINATED = 143  # SIGTERM


class CommandError(KVOffloadError):
    """Raised if a command cannot run with its options. The message names the options to change."""


class OutputError(CommandError):
    """Raised if an output file cannot be written. The file keeps its earlier content.

    Args:
        target: the file's path.
        error: the error from writing.
    """

    def __init__(self, target: object, error: OSError) -> None:
        super().__init__(f"{target} cannot be written: {error.strerror or error}")


def say(text: str) -> None:
    """Print a message to standard error, after "kvoffload: "."""
    print_error(f"kvoffload: {printable(text)}")


def print_error(text: str, end: str = "\n") -> None:
    """Print to standard error, and ignore errors."""
    with suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)
