"""An option whose value is a JSON object, or names a file that holds one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvoffload.checks.machine import reader
from kvoffload.model.errors import ConfigError


def read_object(text: str, option: str) -> dict[str, Any]:
    """Return the JSON object in `text`, or in the file of that name.

    Raises:
        ConfigError: there is none.
    """
    source = option
    if not text.lstrip().startswith("{"):
        source = f"{option} {text}"
        read = reader(Path.cwd())(text) if not text.startswith("/") else reader(Path("/"))(text)
        if read is None:
            raise ConfigError([f"{source} is neither a JSON object nor a file that can be read"])
        text = read
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{source} is not JSON: {error}"]) from error
    if not isinstance(found, dict):
        raise ConfigError([f"{source} holds no JSON object"])
    return found
