"""`kvoffload`: runs a subcommand, and turns the subcommand's exceptions into one line and an exit code.

This module imports little at the top, so that `main` installs the signal handlers early.
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
    "advise": "kvoffload.cli.advise",
    "completion": "kvoffload.cli.completion",
    "dashboards": "kvoffload.cli.dashboards",
    "demo": "kvoffload.cli.demo.command",
    "doctor": "kvoffload.cli.doctor",
    "gpu-check": "kvoffload.gpu_check.command",
    "host-memory": "kvoffload.cli.host_memory",
    "report": "kvoffload.cli.report",
    "settings": "kvoffload.cli.settings",
    "timeline": "kvoffload.cli.timeline",
    "top": "kvoffload.cli.top",
}
"""The module of each subcommand. These modules implement `Command`, and importing them must be fast."""

ENTRY_POINT_GROUP = "kvoffload.commands"
"""The entry points of the adapters' subcommands. Each names a module that implements `Command`."""


_WRITE_ERRORS = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE}
"""Errors of a failed write to standard output. Such an OSError has one of these numbers and no file name."""


class Command(Protocol):
    """The interface of a subcommand's module."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to the parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return the exit code.

        Raises:
            KVOffloadError: the command cannot run with its options.
        """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code.

    The signal handlers stay installed until the process ends.
    """
    try:
        signals.handle()
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # stdout is None if its descriptor is closed
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        code = _command(argv)
        sys.stdout.flush()
        signals.ended()
    except KeyboardInterrupt:
        if not signals.exit_code():
            say("interrupted")
        code = Exit.INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise  # not from standard output: a bug in the subcommand
        # Drop the buffered output, because the interpreter would try to write it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A broken pipe is not an error: its reader, such as `head`, needs no more output.
        if not isinstance(error, BrokenPipeError):
            say(f"error: standard output cannot be written: {error.strerror or error}")
        code = Exit.OUTPUT
    return signals.exit_code() or code


def _command(argv: Sequence[str] | None) -> int:
    from kvoffload.model.errors import KVOffloadError

    try:
        parser = make_parser()
        words = list(sys.argv[1:] if argv is None else argv)
        args = parser.parse_args([*words[1:2], "--help"] if words[:1] == ["help"] else words)
        if args.command is None:
            parser.print_help(sys.stderr)
            return Exit.USAGE
        return load(args.command).run(args)
    except SystemExit as end:  # argparse raises SystemExit after --help or a usage error
        return int(end.code or 0)
    except OutputError as error:
        say(f"error: {error}")
        return Exit.OUTPUT
    except KVOffloadError as error:
        say(f"error: {error}")
        return Exit.USAGE


def make_parser() -> Parser:
    """Return the parser of `kvoffload` and all subcommands."""
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
    """Import and return the module of a subcommand."""
    from importlib import import_module
    from typing import cast

    return cast("Command", import_module(COMMANDS.get(name) or _found()[name]))


def _found() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
