"""Parses vLLM's command line for the doctor as vLLM does, but without importing vLLM.

The parser ignores options that the doctor does not need.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NoReturn

from kvoffload.checks.options import positive, size
from kvoffload.model.errors import ConfigError

CHANGE_SIZES = [
    "--config", "--config-format", "--hf-config-path", "--hf-overrides", "--kv-cache-dtype-skip-layers", "--model-class-overrides",
    "--model-impl", "--quantization-config", "--spec-method", "--spec-model", "--spec-tokens", "--speculative-config", "-sc",
]  # fmt: skip
"""Options with which block sizes cannot be computed from the other options and the model's `config.json`."""

CHOOSE_BLOCKS = ["--attention-backend", "--attention-config", "-ac"]
"""Options with which vLLM may choose a block size other than its default."""

_AddOption = Callable[..., object]
_STARTS = ("serve", "vllm.entrypoints.openai.api_server")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_UNITS = {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"vLLM's command line: {message}"])


def read_command_line(words: Sequence[str], add_options: Callable[[_AddOption], None]) -> argparse.Namespace:
    """Return the options in vLLM's command line. Most options that the command line lacks are None.

    Args:
        words: the command line, such as `vllm serve MODEL --tensor-parallel-size 2`.
        add_options: a function that gets the parser's `add_argument`, and adds further options with it.

    Raises:
        ConfigError: the command does not start vLLM's server, or has an option value that vLLM would refuse.
    """
    begin = next((number for number, word in enumerate(words) if word in _STARTS), None)
    if begin is None:
        raise ConfigError(["a command line of vLLM comes after --, such as: -- vllm serve MODEL"])
    rest = list(_plain(words[begin + 1 :]))
    add = (parser := _Parser(add_help=False)).add_argument
    add_options(add)
    # If --quantization were missing, argparse would take it for an abbreviation of --quantization-config.
    add("--quantization", "-q")
    for name in CHANGE_SIZES + CHOOSE_BLOCKS:
        add(name, nargs="*", dest=name)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    add("--enable-sleep-mode", action=argparse.BooleanOptionalAction)
    add("--decode-context-parallel-size", "-dcp", type=positive, default=1)
    add("--prefill-context-parallel-size", "-pcp", type=positive, default=1)
    add("--distributed-executor-backend")
    add("--prefix-caching-hash-algo")
    found, _ = parser.parse_known_args(rest)
    if rest and not rest[0].startswith("-"):
        found.model = rest[0]
    return found


def number(text: str) -> int:
    """Parse a number or a size for argparse's `type=`. As in vLLM, "1k" is 1,000 and "1K" is 1,024.

    Return 0 for "auto" and "-1", because vLLM then chooses the number itself.
    """
    return 0 if text in ("auto", "-1") else _scaled(text) or size(text)


def _scaled(text: str) -> int | None:
    found = _NUMBER.fullmatch(text)
    return None if found is None else int(Fraction(found[1]) * _UNITS[found[2]])


def _plain(words: Sequence[str]) -> Iterator[str]:
    """Yield a command line's words, with `_` in option names replaced by `-`.

    All `--name.key VALUE` options of one name become one `--name JSON` option.
    """
    objects: dict[str, dict[str, Any]] = {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        name, dot, keys = name.partition(".")
        if not name.startswith("--"):
            yield word
        elif not dot:
            yield name.replace("_", "-") + equals + value
        else:
            *parents, last = keys.split(".")
            inner = objects.setdefault(name.replace("_", "-"), {})
            for key in parents:
                if not isinstance(inner.get(key), dict):
                    inner[key] = {}
                inner = inner[key]
            inner[last] = _value(value if equals else next(left, ""))
    for name, found in objects.items():
        yield from (name, json.dumps(found))


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _scaled(text) or text
