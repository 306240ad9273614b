"""Finds an engine's own arguments in the command lines that people use.

The arguments may follow the engine's command, a container's image, or nothing at all, as in a pod's `args`. The command
may stand in a script, such as that of `bash -c`. An adapter names the engine's commands by a regular expression.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from kvoffload.model.errors import ConfigError

_RUNTIMES = {"docker", "nerdctl", "nvidia-docker", "podman"}
_FLAGS = {
    *("--detach", "--disable-content-trust", "--init", "--interactive", "--no-healthcheck", "--oom-kill-disable"),
    *("--privileged", "--publish-all", "--quiet", "--read-only", "--replace", "--rm", "--rmi", "--sig-proxy", "--tty"),
}  # fmt: skip
"""The options of `docker run` and `podman run` that take no value. All other options take one."""
_SHORT_FLAGS = re.compile(r"-[ditPq]+")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")
_PLACEHOLDER = re.compile(r"\$[A-Za-z_{(]")
_OPERATOR = re.compile(r"[|&;<>\n]+")
_CONTINUED = re.compile(r"\\\n|\n(?=\s*-)")
"""A line's end that does not end a command. No command begins with "-", so such a line continues the one before it."""
_HEAD = re.compile(r"^\s*(?:args|command):[ \t]*(?:[>|]-?)?\s*")
_NUMBERED = re.compile(r"(?<=\s)\d(?=>)")
"""The number of a redirection, as in `2>&1`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """An engine's start.

    Args:
        arguments: the engine's arguments.
        environ: the environment variables that the command line sets.
        command: the engine's command; empty if the line has only the arguments.
        image: the container's image; empty if the line starts the engine on this machine.
    """

    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    image: str = ""

    @property
    def whole_environ(self) -> Mapping[str, str]:
        """The engine's environment variables. A container has none of this machine's variables."""
        return self.environ if self.image else {**os.environ, **self.environ}

    @property
    def local_environ(self) -> Mapping[str, str]:
        """The environment variables that say where this machine has the engine's files, which a container mounts."""
        return os.environ if self.image else self.whole_environ

    @property
    def placeholders(self) -> list[str]:
        """The arguments with a variable, such as `$MODEL`, whose value is not known."""
        return [word for word in self.arguments if _PLACEHOLDER.search(word)]


def find_launch(words: Sequence[str], commands: re.Pattern[str], example: str) -> Launch:
    """Return the engine's start that a command line contains.

    Args:
        words: the command line. One word alone may be a whole script or a list in JSON or YAML.
        commands: matches the engine's commands: a word, or two words with a space between them.
        example: a command line, for the error.

    Raises:
        ConfigError: the command line does not start the engine.
    """
    words = split_script(words[0]) if len(words) == 1 else list(words)
    found = _find(words, commands, {})
    if found is None and _are_arguments(words):
        found = Launch(tuple(words))
    if found is None:
        raise ConfigError(
            [f"{shlex.join(words)[:80]!r} does not start the engine; give a line such as: {example}"]
        )
    known = found.whole_environ
    expanded = tuple(
        _VARIABLE.sub(lambda one: known.get(one[one.lastindex or 0], one[0]), word)
        for word in found.arguments
    )
    return Launch(expanded, found.environ, found.command, found.image)


def split_script(text: str) -> list[str]:
    """Return the words of a shell script, or the items of a JSON list or a YAML list of texts.

    Raises:
        ConfigError: a quote is not closed.
    """
    text = _HEAD.sub("", text, count=1)
    if text.lstrip().startswith("["):
        try:
            return [str(item) for item in json.loads(text)]
        except (ValueError, RecursionError):
            pass
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and all(line.startswith("- ") for line in lines):
        return [_unquoted(line[2:].strip()) for line in lines]
    text = _NUMBERED.sub("", _CONTINUED.sub(" ", text)).strip()
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise ConfigError([f"{text[:80]!r} cannot be split into words: {error}"]) from error


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _find(words: Sequence[str], commands: re.Pattern[str], environ: dict[str, str]) -> Launch | None:
    for number, word in enumerate(words):
        pair = " ".join(words[number - 1 : number + 1]) if number else word
        for command in (word, pair):
            if commands.fullmatch(command):
                return Launch(tuple(_until_operator(words[number + 1 :])), environ, command)
        if word == "run" and any(Path(one).name in _RUNTIMES for one in words[:number]):
            return _find_in_container(words[number + 1 :], commands)
        if any(map(str.isspace, word)) and commands.search(" ".join(word.split())):
            return _find(split_script(word), commands, environ)
        if assigned := _ASSIGNMENT.fullmatch(word):
            environ[assigned[1]] = assigned[2]
    return None


def _until_operator(words: Sequence[str]) -> Iterator[str]:
    yield from takewhile(lambda word: not _OPERATOR.fullmatch(word), words)


def _find_in_container(words: Sequence[str], commands: re.Pattern[str]) -> Launch | None:
    environ: dict[str, str] = {}
    entrypoint: list[str] = []
    image = ""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            image = word
            break
        name, value = _option(word, rest)
        if name in ("-e", "--env"):
            environ |= _variable(value)
        elif name == "--env-file":
            environ |= _variables(value)
        elif name == "--entrypoint":
            entrypoint = value.split()
    inside = [*entrypoint, *rest]
    found = _find(inside, commands, environ)
    if found is None and image and not entrypoint and _are_arguments(inside, may_be_id=True):
        found = Launch(tuple(_until_operator(inside)))
    return None if found is None else Launch(found.arguments, environ, found.command, image)


def _option(word: str, rest: Iterator[str]) -> tuple[str, str]:
    """Return the name and value of an option of `docker run`. The value is empty if the option takes none."""
    name, equals, value = word.partition("=")
    if word in _FLAGS or _SHORT_FLAGS.fullmatch(word):
        return word, ""
    if not word.startswith("--") and len(word) > 2:
        return word[:2], word[2:].removeprefix("=")
    return name, value if equals else next(rest, "")


def _variable(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    value = value if equals else os.environ.get(name, "")
    return {name: value}


def _variables(path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return {}
    found: dict[str, str] = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            found |= _variable(line.strip())
    return found


def _are_arguments(words: Sequence[str], *, may_be_id: bool = False) -> bool:
    """Return whether words can be an engine's arguments: options, or a model and options.

    Args:
        words: the words.
        may_be_id: whether a single name, such as `gpt2`, can be the model.
    """
    if not words or words[0].startswith("-"):
        return bool(words) or may_be_id
    is_model = may_be_id or ("/" in words[0] and not words[0].endswith((".py", ".sh")))
    return is_model and (len(words) == 1 or words[1].startswith("-"))
