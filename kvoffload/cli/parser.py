"""Arguments: errors in one line, no guessing at abbreviations, and the nearest option to a mistyped one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from kvoffload.cli.exits import Exit


class Parser(argparse.ArgumentParser):
    """A parser for the command or one of its subcommands."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})  # type: ignore[arg-type]  # handed through

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, in one line, and exit."""
        self.exit(Exit.USAGE, f"kvoffload: error: {message} (see {self.prog} --help)\n")


def parse(parser: Parser, commands: dict[str, Parser], argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse, or exit with an error that names the options nearest to unknown ones."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        chosen = commands.get(args.command, parser)
        chosen.error("; ".join(_describe(argument, _options(chosen)) for argument in unknown))
    return args


def positive(text: str) -> int:
    """A number of at least 1, for `type=`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def seconds(text: str) -> float:
    """A number of seconds, 0 or more, for `type=`."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return number


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [
        name
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        for name in action.option_strings
    ]


def _describe(argument: str, known: Iterable[str]) -> str:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {argument!r}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")
