"""Reads the options in vLLM's command line that the doctor needs, without importing vLLM.

Where vLLM is installed, its own parser reads the command line too, and its values take precedence.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvoffload.checks.launch import PLACEHOLDER, Launch
from kvoffload.checks.options import positive, read_object, size
from kvoffload.checks.script import load_yaml
from kvoffload.model.errors import ConfigError

DYNAMO = "dynamo.vllm"
COMMANDS = re.compile(
    r"(?:\S*/)?vllm(?:@\S+)? serve|vllm\.entrypoints\.cli\.main serve|vllm\.entrypoints\.(?:openai\.)?api_server|"
    rf"(?:\S*/)?vllm/entrypoints/(?:openai/)?api_server\.py|{re.escape(DYNAMO)}"
)
"""The commands that start vLLM's server."""
EXAMPLE = "vllm serve MODEL ..., docker run IMAGE ..., or a pod's args"

CHANGE_SIZES = (
    *(
        "--config-format",
        "--decode-context-parallel-size",
        "--hf-config-path",
        "--hf-overrides",
        "--kv-cache-dtype-skip-layers",
    ),
    *("--model-class-overrides", "--model-impl", "--quantization-config"),
    *("--spec-method", "--spec-model", "--spec-tokens", "--speculative-config", "--speculative-model"),
)
"""Options with which block sizes cannot be computed from the other options and the model's `config.json`."""

CHOOSE_BLOCKS = ("--attention-backend", "--attention-config")
"""Options with which vLLM may choose a block size other than its default."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_UNITS = {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}
_DASH = re.compile(r"^[\u2010-\u2015\u2212]+(?=\w)")
"""What word processors and web pages make of the hyphens before an option's name."""
_LARGEST_FILE = 1 << 20

_SHORT = {
    "-ac": "--attention-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}


def number(text: str) -> int:
    """Parse a number or a size for argparse's `type=`. As in vLLM, "1k" is 1,000 and "1K" is 1,024.

    Return 0 for "auto" and "-1", because vLLM then chooses the number itself.
    """
    text = text.strip().replace("_", "")  # as in Python, 32_768 is a number
    return 0 if text.lower() in ("auto", "-1") else _scaled(text) or size(text)


_VALUES: Mapping[str, Callable[[str], object]] = {
    "--block-size": positive,
    "--data-parallel-size": positive,
    "--data-parallel-size-local": positive,
    "--decode-context-parallel-size": positive,
    "--distributed-executor-backend": str,
    "--dtype": str,
    "--kv-cache-dtype": str,
    "--kv-cache-memory-bytes": number,
    "--kv-offloading-size": str,
    "--kv-transfer-config": str,
    "--max-model-len": number,
    "--model": str,
    "--num-gpu-blocks-override": positive,
    "--pipeline-parallel-size": positive,
    "--prefill-context-parallel-size": positive,
    "--prefix-caching-hash-algo": str,
    "--revision": str,
    "--tensor-parallel-size": positive,
}
_SWITCHES = ("--enable-cumem-allocator", "--enable-prefix-caching", "--enable-sleep-mode")
_NAMES = {*_VALUES, *_SWITCHES, *CHANGE_SIZES, *CHOOSE_BLOCKS, "--config", "--quantization"}
"""The names that are read, and names of which a read name is an abbreviation."""


@dataclass(slots=True)
class Line:
    """The options in vLLM's command line.

    Args:
        values: the values of the options that the doctor needs, by the names of vLLM's attributes.
        names: the names of all options in the command line.
        transfer: `--kv-transfer-config`; None if the command line lacks it or it cannot be read.
        problems: the values that vLLM would refuse.
        unread: what could not be read, and why.
    """

    values: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    transfer: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def read_line(launch: Launch) -> Line:
    """Return the options in vLLM's command line, and those in the file that `--config` names."""
    line = Line()
    line.problems += [
        f"{word[:80]} begins with a dash that is no hyphen: write --"
        for word in launch.arguments
        if _DASH.match(word)
    ]
    options = [*_options([_DASH.sub("--", word) for word in launch.arguments])]
    files = [value for name, value in options if name == "--config"]
    for file in files[-1:]:
        try:
            options = [*_options(_words_of_file(str(file or ""), is_here=not launch.image)), *options]
        except ConfigError as error:
            line.unread.append(str(error))
    for name, value in options:
        line.names.add(name)
        _read(line, name, value)
    if launch.placeholders:
        line.unread.append(f"the values of variables in {', '.join(launch.placeholders)[:80]}")
    return line


def _read(line: Line, name: str, value: Any) -> None:  # noqa: ANN401  # a text, an object or None
    switch = name.replace("--no-", "--", 1)
    if switch in _SWITCHES:
        line.values[_attribute(switch)] = name == switch
        return
    convert = _VALUES.get(name)
    if convert is None or PLACEHOLDER.search(str(value)):
        return
    try:
        if name == "--kv-transfer-config":
            line.transfer = value if isinstance(value, dict) else read_object(value or "", name)
        elif value is None:
            line.problems.append(f"{name} has no value")
        else:
            line.values[_attribute(name)] = convert(str(value))
    except ConfigError as error:
        line.problems.append(str(error))
    except ArgumentTypeError as error:
        line.problems.append(f"{name}: {error}")


def _attribute(name: str) -> str:
    return "device_blocks" if name == "--num-gpu-blocks-override" else name[2:].replace("-", "_")


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options' names and values. The value is None if no value follows the name.

    A name has dashes and is not abbreviated. All `--name.key VALUE` options of one name become one object.
    """
    objects: dict[str, dict[str, Any]] = {}
    left = deque(words)
    name, is_switch = "", False
    while left:
        word = left.popleft()
        if not _is_option(word):
            if name in ("", *_VALUES) or is_switch:  # after another option, it may be a further value
                yield "--model", word
            continue
        name, equals, value = word.partition("=")
        name, _, keys = name.partition(".")
        name = _whole(_SHORT.get(name, name.replace("_", "-")))
        is_switch = name.replace("--no-", "--", 1) in _SWITCHES
        if not equals and left and not _is_option(left[0]) and not is_switch:
            equals = "="
            value = left.popleft()
        if keys:
            _set(objects.setdefault(name, {}), keys, value)
        else:
            yield name, value if equals else None
    yield from objects.items()


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdecimal()


def _whole(name: str) -> str:
    """Return the name that an abbreviation stands for, or the name itself."""
    longer = [known for known in _NAMES if known.startswith(name)]
    return longer[0] if len(longer) == 1 and name.startswith("--") else name


def _set(found: dict[str, Any], keys: str, value: str) -> None:
    *parents, last = keys.removesuffix("+").split(".")
    for key in parents:
        if not isinstance(found.get(key), dict):
            found[key] = {}
        found = found[key]
    found[last] = value.split(",") if keys.endswith("+") else _value(value)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _scaled(text) or text


def _scaled(text: str) -> int | None:
    found = _NUMBER.fullmatch(text)
    return None if found is None else int(Fraction(found[1]) * _UNITS[found[2]])


def _words_of_file(path: str, *, is_here: bool) -> list[str]:
    """Return the options in the YAML file that `--config` names, as words of a command line.

    Raises:
        ConfigError: the file cannot be read here.
    """
    try:
        import yaml
    except ImportError as error:  # kvoffload does not require PyYAML; every vLLM brings it
        raise ConfigError([f"--config {path} is not read, because PyYAML is not installed here"]) from error
    if not is_here:
        raise ConfigError([f"--config {path} is a file in the container"])
    try:
        with Path(path).open(encoding="utf-8") as file:
            documents = [*load_yaml(file.read(_LARGEST_FILE), f"--config {path}")]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is not YAML"
        raise ConfigError([f"--config {path} cannot be read: {reason}"]) from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ConfigError([f"--config {path} does not hold options with values"])
    return [word for name, value in documents[0].items() for word in _words(str(name), value)]


def _words(name: str, value: object) -> list[str]:
    match value:
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case list():
            return [f"--{name}", *map(str, value)] if value else []
        case dict():
            return [f"--{name}", json.dumps(value)]
        case _:
            return [f"--{name}={value}"]
