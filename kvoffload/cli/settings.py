"""`kvoffload settings`: lists settings with the default, the meaning and the allowed values, as text or a JSON schema.

With `--from` it converts the settings of another product instead.
"""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import textwrap
from collections.abc import Mapping
from itertools import groupby
from typing import get_args

import msgspec

from kvoffload.checks.options import positive
from kvoffload.cli.exits import CommandError, print_error
from kvoffload.model.config import ADVANCED, SETTINGS, Bytes, OffloadConfig, Setting
from kvoffload.model.errors import printable

HELP = "list the settings, each with its default, its meaning and the allowed values; or convert another product's"


_SIZE = {
    "type": ["integer", "string"],
    "minimum": 1,
    "pattern": r"^\s*\d+(\.\d+)?\s*([KkMmGgTt]?[Bb]|[KkMmGgTt][Ii][Bb])?\s*$",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    parser.add_argument("keys", metavar="KEY", nargs="*", help="show only these settings")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON schema, by which a tool can check settings"
    )
    words = (
        "print the settings that replace those of LMCache, KVBM or one of vLLM's own connectors, as JSON, and one line on "
        "standard error for each key without a counterpart: lmcache.yaml, or a kv_transfer_config as JSON or in a file"
    )
    parser.add_argument("--from", dest="source", metavar="FILE|JSON", help=words)
    words = "with --from: the ranks of one engine, by which sizes of one rank are multiplied"
    parser.add_argument("--ranks", type=positive, metavar="N", help=words)


def run(args: argparse.Namespace) -> int:
    """Print the chosen settings, or those that --from gives.

    Raises:
        CommandError: a key is unknown, or --from cannot be converted, is missing beside --ranks or stands beside an
            option with which it makes no sense.
    """
    if args.source is None and args.ranks is not None:
        raise CommandError("--ranks needs --from")
    if args.source is not None and (args.keys or args.json):
        raise CommandError("--from takes neither KEY nor --json; it always prints JSON")
    if args.source is None:
        chosen = _chosen(args.keys)
        print(json.dumps(schema(chosen), indent=1)) if args.json else _list(chosen)
    else:
        from kvoffload.cli.settings_from import convert

        settings, lines = convert(args.source, args.ranks)
        print(json.dumps(settings))
        for line in lines:
            print_error(printable(line))
    return 0


def _chosen(keys: list[str]) -> Mapping[str, Setting]:
    """Return the settings with these keys; all settings if there are none.

    Raises:
        CommandError: a key is unknown.
    """
    for key in keys:
        if key not in SETTINGS:
            near = difflib.get_close_matches(key, SETTINGS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(SETTINGS)}"
            raise CommandError(f"unknown setting {printable(key)[:80]!r}; {hint}")
    return {name: one for name, one in SETTINGS.items() if not keys or name in keys}


def schema(settings: Mapping[str, Setting]) -> dict[str, object]:
    """Return a JSON schema of an object with these settings."""
    defaults = {one.name: one.default for one in msgspec.structs.fields(OffloadConfig)}
    absent = (None, msgspec.NODEFAULT)
    properties = {
        name: {**_kind(one), **({"default": defaults[name]} if defaults[name] not in absent else {})}
        for name, one in settings.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvoffload's settings: the object kv_connector_extra_config of vLLM",
        "type": "object",
        "properties": properties,
        "required": [name for name in settings if defaults[name] is msgspec.NODEFAULT],
        "additionalProperties": False,
    }


def _kind(setting: Setting) -> dict[str, object]:
    """Return the schema of a setting's values."""
    is_size = get_args(setting.type)[1] is get_args(Bytes)[1]
    kind = _SIZE if is_size else msgspec.json.schema(setting.type, schema_hook=lambda _: {"type": "string"})
    # Python's end of a text, and the one that other languages know.
    found: dict[str, object] = json.loads(json.dumps(kind).replace(r"\\Z", "$"))
    return {**found, "title": setting.allowed, "description": setting.meaning}


def _list(chosen: Mapping[str, Setting]) -> None:
    """Print settings. Settings that few users need come last."""
    width = min(max(shutil.get_terminal_size().columns, 20), 100)
    for is_advanced, settings in groupby(chosen.items(), lambda item: item[0] in ADVANCED):
        if is_advanced:
            print("\nAdvanced: leave these as they are unless you work around a problem.\n")
        for name, setting in settings:
            print(f"{name:<28}{setting.default}")
            for text in (setting.meaning, setting.allowed):
                print(textwrap.indent(textwrap.fill(text, width - 4), "    "))
