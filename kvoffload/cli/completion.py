"""`kvoffload completion SHELL`: prints the shell's completion script for commands and options."""

from __future__ import annotations

import argparse

from kvoffload.cli.exits import CommandError, Exit

HELP = "print a completion script for a shell"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish", "tcsh"], help="which shell")


def run(args: argparse.Namespace) -> int:
    """Print the completion script for `args.shell`.

    Raises:
        CommandError: shtab, which generates the script, is not installed.
    """
    from kvoffload.cli.main import make_parser

    try:
        import shtab
    except ModuleNotFoundError as error:
        raise CommandError("shtab is not installed: pip install 'kvoffload[completion]'") from error
    print(shtab.complete(make_parser(), shell=args.shell))
    return Exit.OK
