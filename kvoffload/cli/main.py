"""`kvoffload`: finds the subcommand, runs it, and turns what it raises into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

import kvoffload
from kvoffload.cli.ending import sigterm_exits
from kvoffload.cli.exits import Exit
from kvoffload.cli.parser import Parser, parse
from kvoffload.model.errors import KVOffloadError

COMMANDS = {
    "bench": "kvoffload.cli.bench",
    "demo": "kvoffload.cli.demo.command",
    "doctor": "kvoffload.cli.doctor.command",
    "report": "kvoffload.cli.report.command",
    "timeline": "kvoffload.cli.timeline",
    "top": "kvoffload.cli.top.command",
}
"""Subcommands and the module of each, which is a `Command`. Importing one must be cheap."""

EXIT_CODES = (
    f"Exit codes: {Exit.OK:d} well; {Exit.FAILED:d} it ran, and something it found or did is wrong; {Exit.USAGE:d} it cannot run "
    f"as asked; {Exit.INTERRUPTED:d} ended by Ctrl-C; {Exit.TERMINATED:d} ended by SIGTERM. The last two end it in order."
)


class Command(Protocol):
    """What the module of a subcommand holds."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say which options there are."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code.

        Raises:
            KVOffloadError: it cannot be done as asked.
        """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code; wrong usage and SIGTERM exit."""
    parser, commands = _parsers()
    args = parse(parser, commands, argv)
    try:
        with sigterm_exits():
            code = _load(args.command).run(args)
        sys.stdout.flush()
        return code
    except KVOffloadError as error:
        print(f"kvoffload: error: {error}", file=sys.stderr)
        return Exit.USAGE
    except KeyboardInterrupt:
        print("kvoffload: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left; the interpreter's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="kvoffload", description="KV-cache offloading for LLM engines.", epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"kvoffload {kvoffload.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    commands = {}
    for name in COMMANDS:
        command = _load(name)
        commands[name] = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(commands[name])
    return parser, commands


def _load(name: str) -> Command:
    return cast("Command", import_module(COMMANDS[name]))
