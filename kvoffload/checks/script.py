"""Makes words of the texts in which people keep an engine's start: shell scripts, lists, pods' and compose's YAML."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from kvoffload.model.errors import ConfigError

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_COMMENT = re.compile(rf"({_QUOTED})|(?:^|(?<=\s))#[^\n]*", re.DOTALL | re.MULTILINE)
_ARRAY = re.compile(rf"^[ \t]*(\w+)=\(((?:{_QUOTED}|[^)'\"\\])*)\)", re.DOTALL | re.MULTILINE)
_CONTINUED = re.compile(r"\\[ \t\r]*\n|\n(?=\s*-)")
"""A line's end that does not end a command. No command begins with "-", so such a line continues the one before it."""
_NUMBERED = re.compile(r"(?<=\s)\d(?=>)")
"""The number of a redirection, as in `2>&1`."""
_DOCKERFILE = re.compile(r"\s*(?:CMD|ENTRYPOINT|ExecStart=)\s*")
_KEYS = (("entrypoint", "command"), ("command", "args"))
"""The keys that name a container's command and its arguments: those of compose and those of a pod."""
_YAML_LIKE = re.compile(r"\s*(?:#[^\n]*\n\s*)*(?:\[|- |(?:entrypoint|command|args):)")


def split_script(text: str) -> list[str]:
    """Return the words of a shell script, of a list in JSON or YAML, or of a container's command and arguments.

    Raises:
        ConfigError: a quote is not closed, or the text is YAML and PyYAML is not installed.
    """
    text = _DOCKERFILE.sub("", text, count=1) if _DOCKERFILE.match(text) else text
    if _YAML_LIKE.match(text):
        found = _read(text)
        if isinstance(found, list):
            return [str(item) for item in found]
        if isinstance(found, dict):
            first, second = _KEYS["args" in found]
            return [*_words(found.get(first)), *_words(found.get(second))]
    return _split(text)


def _read(text: str) -> Any:  # noqa: ANN401  # whatever the text holds
    """Return what is in a JSON or YAML text; None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        import yaml
    except ImportError as error:  # kvoffload does not require PyYAML; every vLLM brings it
        raise ConfigError([f"{text[:80]!r} is read as YAML, which needs: pip install pyyaml"]) from error
    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _words(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [] if value is None else _split(str(value))


def _split(text: str) -> list[str]:
    text = _COMMENT.sub(lambda found: found[1] or "", text)
    for name, items in _ARRAY.findall(text):
        value = items.replace("\n", " ").replace("\\", r"\\")  # a backslash stands for itself
        text = re.sub(rf'"?\$\{{{name}\[[@*]\]\}}"?', value, text)
    text = _NUMBERED.sub("", _CONTINUED.sub(" ", text)).strip()
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise ConfigError([f"{text[:80]!r} cannot be split into words: {error}"]) from error
