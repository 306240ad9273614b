"""`kvoffload`: finds the subcommand, runs it, and turns what it raises into one line and an exit code.

Signals are handled from the first line of `main` on, so this module imports next to nothing before that.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Protocol

from kvoffload.cli import signals
from kvoffload.cli.exits import Exit, OutputError, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvoffload.cli.parser import Parser

COMMANDS = {
    "completion": "kvoffload.cli.completion",
    "dashboards": "kvoffload.cli.dashboards",
    "demo": "kvoffload.cli.demo.command",
    "doctor": "kvoffload.cli.doctor",
    "gpu-check": "kvoffload.gpu_check.command",
    "report": "kvoffload.cli.report",
    "timeline": "kvoffload.cli.timeline",
    "top": "kvoffload.cli.top",
}
"""Subcommands and the module of each, which is a `Command`. Importing one must be cheap."""

ENTRY_POINT_GROUP = "kvoffload.commands"
"""Subcommands of adapters, by name; each names a module that is a `Command`."""


_WRITE_ERRORS = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE}
"""Errors of writes to standard output, which come without a file's name."""


class Command(Protocol):
    """What the module of a subcommand holds."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to the parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code.

        Raises:
            KVOffloadError: it cannot be done as asked.
        """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code.

    Signals stay handled until the process ends. A standard output that cannot be written is reported once.
    """
    try:
        signals.handle()
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # None if its descriptor is closed
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        code = _command(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if not signals.exit_code():
            say("interrupted")
        code = Exit.INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise  # the command should have reported its own file
        # Drop what is buffered, or the interpreter would try again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader closed the pipe on purpose, as `head` does
            say(f"error: standard output cannot be written: {error.strerror or error}")
        code = Exit.OUTPUT
    return signals.exit_code() or code


def _command(argv: Sequence[str] | None) -> int:
    from kvoffload.model.errors import KVOffloadError

    try:
        parser = make_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return Exit.USAGE
        return load(args.command).run(args)
    except SystemExit as end:  # of argparse, after help or wrong usage
        return int(end.code or 0)
    except OutputError as error:
        say(f"error: {error}")
        return Exit.OUTPUT
    except KVOffloadError as error:
        say(f"error: {error}")
        return Exit.USAGE


def make_parser() -> Parser:
    """Return the command's parser, with its subcommands."""
    import kvoffload
    from kvoffload.cli.parser import Parser

    codes = (
        f"Exit codes: {Exit.OK:d} success; {Exit.FAILED:d} it ran, and found or did something wrong; {Exit.USAGE:d} it "
        f"cannot run as asked; {Exit.MISSED:d} gpu-check has missed a goal; {Exit.OUTPUT:d} output cannot be written; "
        f"{Exit.HUNG_UP:d} ended by SIGHUP; {Exit.INTERRUPTED:d} by Ctrl-C; {Exit.TERMINATED:d} by SIGTERM."
    )
    parser = Parser(prog="kvoffload", description="KV-cache offloading for LLM engines.", epilog=codes)
    parser.add_argument("--version", action="version", version=f"kvoffload {kvoffload.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name in sorted([*COMMANDS, *_found()]):
        command = load(name)
        command.add_arguments(subparsers.add_parser(name, help=command.HELP, description=command.HELP))
    return parser


def load(name: str) -> Command:
    """Import the module of a subcommand."""
    from importlib import import_module
    from typing import cast

    return cast("Command", import_module(COMMANDS.get(name) or _found()[name]))


def _found() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
