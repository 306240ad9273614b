"""An argument parser with one-line errors, no abbreviations, suggestions for typos, and defaults in the help."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from kvoffload.cli.exits import Exit
from kvoffload.model.errors import printable

_SIMILAR = 0.7  # difflib's cutoff, high enough that only typos match


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Leaves space for long option names, and shows defaults unless they are booleans, lists or None."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, bool | list) or action.default in (None, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser for `kvoffload` or one of its subcommands."""

    def __init__(self, *args: object, **settings: object) -> None:
        ours = {"allow_abbrev": False, "formatter_class": HelpFormatter, **settings}
        super().__init__(*args, **ours)  # type: ignore[arg-type]  # passed through
        self._negative_number_matcher = re.compile(r"-\d")  # so that -5m, too, is a value and no option

    def parse_known_args(  # type: ignore[override]  # argparse declares overloads; it calls this for subcommands too
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments. For an unknown option, exit with an error that suggests the most similar option."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            shown = (action for action in self._actions if action.help is not argparse.SUPPRESS)
            known = [name for action in shown for name in action.option_strings]
            self.error("; ".join(_describe(argument, known) for argument in unknown))
        return found, unknown

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raise an error that suggests the most similar choice if the value is not one of the choices."""
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), names, n=1, cutoff=_SIMILAR)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentError(
            action, f"{value!r} is not a choice{hint} (choose from {', '.join(names)})"
        )

    def error(self, message: str) -> NoReturn:
        """Print the error and a reference to `--help` in one line, and exit."""
        self.exit(Exit.USAGE, f"kvoffload: error: {printable(message)} (see {self.prog} --help)\n")


def _describe(argument: str, known: Iterable[str]) -> str:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {argument!r}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")
