"""Converts another product's settings to ours, for `kvoffload settings --from`.

A value is shown only if it becomes one of our settings, because such files hold credentials.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvoffload.checks.script import load_yaml
from kvoffload.cli.exits import CommandError
from kvoffload.model.config import parse_config
from kvoffload.model.errors import ConfigError
from kvoffload.model.peers import PEERS, Counterpart, pairs, plain

_LARGEST = 1 << 20
_NAME = re.compile(r"[\w./~+-]{1,200}")
_UNITS = (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6))


def convert(text: str, ranks: int | None) -> tuple[dict[str, object], list[str]]:
    """Return our settings, and a line for each key that has no counterpart.

    Args:
        text: a JSON object, or the name of a file with JSON or YAML.
        ranks: the ranks of one engine; None if they are not known.

    Raises:
        CommandError: the text cannot be read, belongs to no known product, has a value that the product would refuse, or
            has no key with a counterpart.
    """
    is_file = not text.lstrip().startswith("{")
    # What is neither a file's name nor JSON may be a mistyped configuration, and is not repeated.
    source = f"--from {text}" if is_file and _NAME.fullmatch(text) else "--from"
    name, values = _recognise(_read(text, source, is_file=is_file), source)
    peer = PEERS[name]
    given = [(key, value, peer.find(key)) for key, value in pairs(peer, values) if value is not None]
    by_name = {plain(key): value for key, value, _ in reversed(given)}
    rows = [*peer.keys.values()]
    given.sort(key=lambda one: rows.index(one[2]) if one[2] else -1)  # the table's earlier key counts
    settings: dict[str, object] = {}
    lines = [f"read as settings of {name}"]
    for key, value, row in given:
        try:
            lines += _add(settings, key, value, row, by_name, ranks)
        except ValueError as error:
            raise CommandError(f"{source}: {key} must be {error}") from error
    if not settings:
        raise CommandError(
            "; ".join([f"{source}: no key of {name} has a counterpart", *lines[1:], peer.elsewhere])
        )
    try:
        parse_config({"host_bytes": 1, **settings})
    except ConfigError as error:
        raise CommandError(f"{source}: {error}") from error
    return settings, [*lines, *_missing(settings)]


def _read(text: str, source: str, *, is_file: bool) -> Mapping[str, Any]:
    if is_file:
        try:
            with Path(text).open(encoding="utf-8", errors="replace") as file:
                text = file.read(_LARGEST)  # limited, because a device file may never end
        except (OSError, ValueError) as error:  # ValueError: the text cannot be a file's name
            raise CommandError(f"{source} is neither a JSON object nor a file that can be read") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not is_file:
            raise CommandError(f"{source} is not JSON: {error}") from error
        found = _read_yaml(text, source)
    if not isinstance(found, dict):
        raise CommandError(
            f"{source} does not hold keys with values, as lmcache.yaml or kv_transfer_config do"
        )
    return {str(key): value for key, value in found.items()}


def _read_yaml(text: str, source: str) -> object:
    try:
        import yaml
    except ImportError as error:  # kvoffload does not require PyYAML; every vLLM brings it
        raise CommandError(f"{source} is not JSON, and to read YAML: pip install pyyaml") from error
    try:
        documents = list(load_yaml(text, source))
    except ConfigError as error:
        raise CommandError(str(error)) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # The error's own text would repeat the line, which may hold a credential.
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise CommandError(f"{source} is neither JSON nor YAML{place}") from error
    return documents[0] if len(documents) == 1 else None


def _recognise(given: Mapping[str, Any], source: str) -> tuple[str, Mapping[str, Any]]:
    """Return the product's name and its keys."""
    wrapped = given.get("kv_transfer_config", given.get("kv-transfer-config"))
    if isinstance(wrapped, str):  # vLLM's --config may hold the text that its command line takes
        with suppress(ValueError, RecursionError):
            wrapped = json.loads(wrapped)
    config = wrapped if isinstance(wrapped, dict) else given
    if "kv_connector" in config:
        connectors = {one: name for name, peer in PEERS.items() for one in peer.connectors}
        for entry in _entries(config):
            name = connectors.get(str(entry.get("kv_connector")))
            if name is not None:
                return name, _extra(entry)
        raise CommandError(
            f"{source}: kv_connector must be one of {', '.join(connectors)}, also inside MultiConnector"
        )
    counts = {name: sum(peer.find(key) is not None for key in given) for name, peer in PEERS.items()}
    best = max(counts, key=lambda name: counts[name])
    if not counts[best]:
        raise CommandError(f"{source} has neither kv_connector nor a key of {', '.join(PEERS)}")
    return best, given


def _entries(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a connector's configuration, and those of the connectors inside it."""
    yield config
    inside = _extra(config).get("connectors")
    yield from (one for one in inside if isinstance(one, dict)) if isinstance(inside, list) else ()


def _extra(config: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = config.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def _add(
    settings: dict[str, object],
    key: str,
    value: object,
    row: Counterpart | None,
    by_name: Mapping[str, object],
    ranks: int | None,
) -> Iterator[str]:
    """Add the setting for a key, and yield what the reader must know about the key."""
    if row is None:
        yield f"{key}: not a known key of this product"
        return
    if isinstance(value, str | int | float) and str(value).lower() in row.same:
        return
    ours = row.convert(value, by_name) if row.convert is not None else None
    if ours is None:
        yield f"{key}: {row.note}"
    elif ours != "" and row.setting in settings:
        yield f"{key}: not used, because another key sets {row.setting}"
    elif ours != "":
        if row.is_per_rank and ranks is None:
            yield f"{key}: counts one rank; if an engine has several, give --ranks"
        if isinstance(ours, int) and row.setting in ("host_bytes", "disk_bytes"):
            ours = _size_text(ours * (ranks or 1) if row.is_per_rank else ours)
        settings[row.setting] = ours


def _size_text(size: int) -> str | int:
    return next((f"{size // unit}{name}" for name, unit in _UNITS if size % unit == 0), size)


def _missing(settings: Mapping[str, object]) -> Iterator[str]:
    if "host_bytes" not in settings:
        yield "host_bytes: must be given too"
    if "disk_bytes" in settings and "disk_path" not in settings:
        yield "disk_path: must be given too, for a disk tier"
