"""Arguments: errors in one line, no abbreviations, the nearest name to a mistyped one, and defaults in the help."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from kvoffload.cli.exits import Exit, printable

_SIMILAR = 0.7  # of difflib: a slip of the finger; with less it suggests options of another meaning


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Leaves room for long names, and shows the defaults that matter to the reader."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, bool | list) or action.default in (None, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser for the command or one of its subcommands."""

    def __init__(self, *args: object, **settings: object) -> None:
        ours = {"allow_abbrev": False, "formatter_class": HelpFormatter, **settings}
        super().__init__(*args, **ours)  # type: ignore[arg-type]  # handed through

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the help is, in one line, and exit."""
        self.exit(Exit.USAGE, f"kvoffload: error: {printable(message)} (see {self.prog} --help)\n")


def parse(parser: Parser, commands: dict[str, Parser], argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse, or exit with an error that names the options nearest to unknown ones."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        chosen = commands.get(args.command, parser)
        chosen.error("; ".join(_describe(argument, _options(chosen)) for argument in unknown))
    return args


def positive(text: str) -> int:
    """Return a number of at least 1, for `type=`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def seconds(text: str) -> float:
    """Return a number of seconds, 0 or more, for `type=`."""
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
    near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")
