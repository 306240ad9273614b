"""Parses command-line options: numbers, sizes, times, and settings.

Settings are given as a JSON object, as the name of a file with a JSON object, or as KEY=VALUE.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kvoffload.model.config import parse_bytes
from kvoffload.model.errors import ConfigError

_LARGEST = 1 << 20
_MOST_S = 10**9
_PAIR = re.compile(r"(\w+)=(.*)", re.DOTALL)


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse's `type=`."""
    with suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def seconds(text: str) -> float:
    """Parse a number of seconds for which `time.sleep` can wait, for argparse's `type=`."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) <= _MOST_S:
            return number
    raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_MOST_S:,}")


def size(text: str) -> int:
    """Parse a number of bytes, with or without a unit, for argparse's `type=`."""
    with suppress(ValueError):
        return parse_bytes(int(text) if text.isdecimal() else text)
    raise ArgumentTypeError(f"{text!r} is not a size such as 80GiB")


def read_object(text: str, option: str) -> dict[str, Any]:
    """Return the JSON object in `text`, or in the file that `text` names.

    Raises:
        ConfigError: the text or the file is not a JSON object, or the file cannot be read.
    """
    source = option
    if not text.lstrip().startswith("{"):
        source = f"{option} {text}"
        try:
            with open(text, encoding="utf-8", errors="replace") as file:
                text = file.read(_LARGEST)  # limited, because a device file may never end
        except (OSError, ValueError) as error:  # ValueError: the text cannot be a file's name
            raise ConfigError([f"{source} is neither a JSON object nor a file that can be read"]) from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{source} is not JSON: {error}"]) from error
    if not isinstance(found, dict):
        raise ConfigError([f"{source} does not hold a JSON object"])
    return found


def read_settings(texts: Iterable[str], option: str, **own: str | None) -> dict[str, Any]:
    """Return the settings given by a repeatable option. Each value is a JSON object, a file's name or KEY=VALUE.

    Args:
        texts: the option's values.
        option: the option's name.
        own: settings that have an option of their own; None if that option was not given.

    Raises:
        ConfigError: a text cannot be read, or a key is set twice.
    """
    settings: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    for text in texts:
        pair = _PAIR.fullmatch(text)
        found = read_object(text, option) if pair is None else {pair[1]: _value(pair[2])}
        if twice := settings.keys() & found.keys():
            raise ConfigError(
                [
                    f"{', '.join(sorted(twice))} is set twice: in {option}, or there and by an option of its own"
                ]
            )
        settings |= found
    return settings


def _value(text: str) -> object:
    """Parse a number, true or false as JSON; return any other text unchanged."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text
