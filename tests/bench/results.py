"""Prints the lines of a bench as a table or JSON, and saves the lines to one file per bench and machine."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvoffload.cli.exits import CommandError, Exit, say
from kvoffload.cli.partial_file import written
from kvoffload.telemetry.provenance import describe_machine
from tests.bench.lines import Line, table

MOST_BYTES = 30_000
_NOT_IN_NAMES = re.compile("[^a-z0-9]+")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", metavar="DIR", type=Path, help="write the results into DIR, as JSON, too")


def give_out(
    name: str,
    args: argparse.Namespace,
    method: str,
    measuring: Iterable[Line],
    *packages: str,
) -> int:
    """Run a bench, print the lines, and save the lines if requested. Return the exit code.

    Args:
        name: the bench's name.
        args: the parsed options of the bench.
        method: a description of the method.
        measuring: measures and yields the lines.
        packages: distributions whose versions the result contains.

    Raises:
        CommandError: the bench cannot run, or a file cannot be written.
    """
    about = _machine(*packages)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    lines = list(measuring)
    result = {
        "began": began,
        "options": _options(args),
        "machine": about,
        "method": method,
        "lines": [one.to_plain() for one in lines],
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        about_text = ", ".join(f"{key} {value}" for key, value in about.items())
        print("\n".join([about_text, method, "", *table(lines)]))
    # Save after printing, so that an error from writing the file does not lose the results.
    if args.save is not None:
        say(f"written: {_save(name, result, args.save)}")
    return Exit.OK


def _options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options of a bench except paths, which differ between machines."""
    hidden = ("json", "save")
    return {
        name: value
        for name, value in vars(args).items()
        if name not in hidden and isinstance(value, str | int | float | list | tuple | None)
    }


def _machine(*packages: str) -> dict[str, object]:
    """Return a description of the machine: GPU, processor, memory, load, and versions of packages.

    Args:
        packages: further distributions. Those that are not installed are left out.
    """
    found: dict[str, object] = {}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for name in ("kvoffload", "torch", *packages):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**describe_machine(), "load": round(os.getloadavg()[0], 2), **found}


def _save(name: str, result: Mapping[str, object], folder: Path) -> Path:
    """Write a result to NAME-MACHINE.json in a folder, and return the path. Replace an existing file.

    Args:
        name: the bench's name.
        result: the result as JSON types. The entry "machine" determines the file's name.
        folder: the folder, which is created if it does not exist.

    Raises:
        CommandError: the file cannot be written, or the result takes more than `MOST_BYTES`.
    """
    about = result["machine"]
    assert isinstance(about, Mapping)
    text = (
        json.dumps({"bench": name, "date": datetime.now(UTC).date().isoformat(), **result}, indent=1) + "\n"
    )
    if len(text) > MOST_BYTES:
        raise CommandError(f"the results of {name} take {len(text)} bytes, over {MOST_BYTES}")
    target = folder / f"{name}-{_slug(about)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror or error}") from error
    with written(target) as file:
        file.write(text)
    return target


def _slug(about: Mapping[str, object]) -> str:
    """Return a machine's name in file names: the GPU, or the processor and the number of cores."""
    named = about.get("gpu") or f"{about['cpu']} {about['cores']} cores"
    plain = re.sub(r"\((r|tm)\)|processor|cpu|@", " ", str(named).lower())
    return _NOT_IN_NAMES.sub("-", plain).strip("-")
