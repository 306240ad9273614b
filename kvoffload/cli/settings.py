"""`kvoffload settings`: lists every setting with the default, the meaning and the allowed values.

With `--from` it converts the settings of another product instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from itertools import groupby

from kvoffload.checks.options import positive
from kvoffload.cli.exits import CommandError, print_error
from kvoffload.model.config import ADVANCED, SETTINGS
from kvoffload.model.errors import printable

HELP = "list the settings, each with its default, its meaning and the allowed values; or convert another product's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    words = (
        "print the settings that replace those of LMCache, KVBM or one of vLLM's own connectors, as JSON, and one line on "
        "standard error for each key without a counterpart: lmcache.yaml, or a kv_transfer_config as JSON or in a file"
    )
    parser.add_argument("--from", dest="source", metavar="FILE|JSON", help=words)
    words = "with --from: the ranks of one engine, by which sizes of one rank are multiplied"
    parser.add_argument("--ranks", type=positive, metavar="N", help=words)


def run(args: argparse.Namespace) -> int:
    """Print all settings, or those that --from gives.

    Raises:
        CommandError: --from cannot be converted, or is missing beside --ranks.
    """
    if args.source is None and args.ranks is not None:
        raise CommandError("--ranks needs --from")
    if args.source is None:
        _list()
    else:
        from kvoffload.cli.settings_from import convert

        settings, lines = convert(args.source, args.ranks)
        print(json.dumps(settings))
        for line in lines:
            print_error(printable(line))
    return 0


def _list() -> None:
    """Print all settings. Settings that few users need come last."""
    width = min(shutil.get_terminal_size().columns, 100)
    for is_advanced, settings in groupby(SETTINGS.items(), lambda item: item[0] in ADVANCED):
        if is_advanced:
            print("\nAdvanced: leave these as they are unless you work around a problem.\n")
        for name, setting in settings:
            print(f"{name:<28}{setting.default}")
            for text in (setting.meaning, setting.allowed):
                print(textwrap.indent(textwrap.fill(text, width - 4), "    "))
