"""Finds an engine's own arguments in the command lines that people use.

The arguments may follow the engine's command, a container's image, or nothing at all, as in a pod's `args`. The command
may stand in a script, such as that of `bash -c`, or in a file that describes containers. An adapter names the engine's
commands by a regular expression. `split_script` makes words of a text and `read_containers` finds containers in it; this
module looks for the engine's command in them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from kvoffload.checks.containers import read_containers
from kvoffload.checks.script import split_script
from kvoffload.model.errors import ConfigError

_RUNTIMES = {"docker", "nerdctl", "nvidia-docker", "podman"}
_FLAGS = {
    *("--build", "--detach", "--disable-content-trust", "--env-host", "--init", "--interactive", "--no-deps"),
    *("--no-healthcheck", "--no-hostname", "--no-hosts", "--no-TTY", "--oom-kill-disable", "--privileged"),
    *("--publish-all", "--quiet", "--quiet-pull", "--read-only", "--read-only-tmpfs", "--remove-orphans", "--replace"),
    *("--rm", "--rmi", "--service-ports", "--sig-proxy", "--tls-verify", "--tty", "--unsetenv-all", "--use-aliases"),
}  # fmt: skip
"""The options of `run` of Docker, Docker Compose and Podman that take no value. All other options take one."""
_SHORT_FLAGS = re.compile(r"-[ditPqT]+")
_OF_CLUSTERS = {"apptainer", "singularity"}
_IMAGE_OF_KUBECTL = re.compile(r"--image[= ](\S+)")
_IMAGE_OF_CLUSTERS = re.compile(r".+\.(?:sif|simg|img)|\w[\w-]*://.+|\$\{?\w+\}?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\$?(?:\{(\w+)(?::?-([^{}]*))?\}|\((\w+)\)|(\w+))")
PLACEHOLDER = re.compile(r"\$[\w{(@*]|`")
"""What stands for a value that a shell or a cluster puts there: a variable, or a command's output."""
_DOCTOR = re.compile(r"(?:\S*/)?kvoffload doctor(?: |$)")
"""The command of an init container that checks the engine's line, which it may repeat."""
_OPERATOR = re.compile(r"[|&;<>\n]+")


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
        return [word for word in self.arguments if PLACEHOLDER.search(word)]


def find_launch(words: Sequence[str], commands: re.Pattern[str], example: str) -> Launch:
    """Return the engine's start that a command line contains.

    Args:
        words: the command line. One word alone may be a whole script or a list in JSON or YAML.
        commands: matches the engine's commands: a word, or two words with a space between them.
        example: a command line, for the error.

    Raises:
        ConfigError: the command line does not start the engine.
    """
    line = words[0] if len(words) == 1 else shlex.join(words)
    found = _find_in_containers(words[0], commands) if len(words) == 1 else None
    if found is None:
        words = split_script(words[0]) if len(words) == 1 else list(words)
        found = _find(words, commands, {}, os.environ)
    if found is None and _are_arguments(words):
        found = Launch(tuple(words))
    if found is None:
        file = next((word for word in words if _is_file(word)), None)
        hint = f'give the text of the file: "$(cat {file})"' if file else f"give a line such as: {example}"
        raise ConfigError([f"{line[:80]!r} does not start the engine; {hint}"])
    expanded = tuple(part for word in found.arguments for part in _expanded(word, found.whole_environ))
    return Launch(expanded, found.environ, found.command, found.image)


def _is_file(word: str) -> bool:
    try:
        return Path(word).suffix != "" and Path(word).is_file()
    except (OSError, ValueError):
        return False


def _find_in_containers(text: str, commands: re.Pattern[str]) -> Launch | None:
    """Return the start in the containers that a text describes. Those that name the engine's command take precedence.

    Raises:
        ConfigError: several containers could be the engine's.
    """
    named, images = list[Launch](), list[Launch]()
    for one in read_containers(text):
        environ, line = dict(one.environ), [*one.command, *one.arguments]
        if _DOCTOR.match(" ".join(line)):
            continue
        if found := _find(line, commands, environ, {}):
            named.append(Launch(found.arguments, environ, found.command, one.image))
        elif not one.command and _are_arguments(one.arguments, may_be_id=bool(one.image)):
            images.append(Launch(one.arguments, environ, image=one.image))
    starts = named or images
    if any(one != starts[0] for one in starts):
        names = ", ".join(one.image or "one without an image" for one in starts)
        raise ConfigError(
            [f"each of {len(starts)} containers could be the engine's ({names}); give only its own part"]
        )
    return starts[0] if starts else None


def _expanded(word: str, known: Mapping[str, str]) -> list[str]:
    """Return a word with the values of its variables. Only a variable can make several words: that of further options."""
    text = _valued(word, known)
    is_whole = text != word and _VARIABLE.fullmatch(word)
    return split_script(text) if is_whole and text[:1] in ("", "-") else [text]


def _valued(text: str, known: Mapping[str, str]) -> str:
    """Return a text in which each variable whose value is known is replaced by the value."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3] or found[4], found[2]
        if name in known and (known[name] or default is None):
            return known[name]
        return found[0] if default is None else default

    return _VARIABLE.sub(value, text)


def _find(
    words: Sequence[str], commands: re.Pattern[str], environ: dict[str, str], outer: Mapping[str, str]
) -> Launch | None:
    """Return the first start in words; None if they contain none.

    Args:
        words: the words.
        commands: matches the engine's commands.
        environ: the environment variables that the line sets before the words. Those that the words set are added.
        outer: the other environment variables that a script sees.
    """
    for number, word in enumerate(words):
        pair = " ".join(words[number - 1 : number + 1]) if number else word
        for command in (word, pair):
            if commands.fullmatch(command):
                return Launch(tuple(_until_operator(words[number + 1 :])), environ, command)
        if word in ("run", "create") and (launch := _find_after_run(words, number, commands)):
            return launch
        if commands.search(" ".join(word.split())) and (parts := split_script(word)) != [word]:
            return _find(parts, commands, environ, outer)
        if assigned := _ASSIGNMENT.fullmatch(word):
            environ[assigned[1]] = _valued(assigned[2], {**outer, **environ})
    return None


def _until_operator(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command: those before an operator or the bracket that ends a subshell."""
    for word in takewhile(lambda word: not _OPERATOR.fullmatch(word), words):
        if is_last := word.endswith(")") and word.count(")") > word.count("("):
            word = word[:-1]
        if word:
            yield word
        if is_last:
            return


def _find_after_run(words: Sequence[str], number: int, commands: re.Pattern[str]) -> Launch | None:
    """Return the start in a container that the word `run` or `create` with this number in `words` runs."""
    programs, rest = {Path(word).name for word in words[:number]}, words[number + 1 :]
    if programs & _RUNTIMES:
        return _find_in_container(rest, commands)
    if "kubectl" in programs and (named := _IMAGE_OF_KUBECTL.search(" ".join(rest))) and "--" in rest:
        return _find_in_image(named[1], rest[rest.index("--") + 1 :], {}, commands)
    if programs & _OF_CLUSTERS:
        image = next((word for word in rest if _IMAGE_OF_CLUSTERS.fullmatch(word)), None)
        if image is not None:
            inside = rest[rest.index(image) + 1 + ("instance" in words[:number]) :]
            return _find_in_image(image, inside, {}, commands)
    return None


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
    if entrypoint:
        found = _find([*entrypoint, *rest], commands, environ, {})
        return found and Launch(found.arguments, environ, found.command, image)
    return _find_in_image(image, [*rest], environ, commands) if image else None


def _find_in_image(
    image: str, words: Sequence[str], environ: dict[str, str], commands: re.Pattern[str]
) -> Launch | None:
    """Return the start in an image's container, whose own command may be the engine's."""
    found = _find(words, commands, environ, {})
    if found is None and _are_arguments(words, may_be_id=True):
        found = Launch(tuple(_until_operator(words)))
    return found and Launch(found.arguments, environ, found.command, image)


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
