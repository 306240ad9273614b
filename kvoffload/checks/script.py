"""Makes words of the texts in which people keep an engine's start: shell scripts, systemd's units, and lists in JSON or YAML."""

from __future__ import annotations

import json
import re
import reprlib
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvoffload.model.errors import ConfigError

if TYPE_CHECKING:
    import yaml

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_COMMENT = re.compile(rf"({_QUOTED})|(?:^|(?<=\s))#[^\n]*", re.DOTALL | re.MULTILINE)
_ARRAY = re.compile(rf"^[ \t]*(\w+)=\(((?:{_QUOTED}|[^)'\"\\])*)(\))?", re.DOTALL | re.MULTILINE)
"""The start of an array, its items, and the bracket that closes it. One that is not closed matches too: otherwise each such line would
be compared with the whole rest of the text."""
_ALL_ITEMS = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_LINE_ENDS = re.compile(r"(?:\\|(?<=\s)[`^])[ \t\r]*\n|(\n\s*)(-)?")
"""The ends of lines. The first kind, also of PowerShell and of Windows' shell, does not end a command. All blank lines are one match:
otherwise each of them would be compared with all that follow."""
_NUMBERED = re.compile(r"(?<=\s)\d(?=>)")
"""The number of a redirection, as in `2>&1`."""
_INSTRUCTION = re.compile(r"\s*(?:CMD|ENTRYPOINT)\s+")
"""What stands before a command in a line of a Dockerfile."""
_UNIT_COMMAND = re.compile(r"^[^\S\n]*ExecStart=[-@:+!|]*", re.MULTILINE)
_UNIT_VARIABLES = re.compile(r"^[^\S\n]*Environment=", re.MULTILINE)
_LARGEST = 1 << 20
"""How many characters a YAML text may have whose aliases are written out. Manifests have a few thousand."""
_LIST_LIKE = re.compile(r"\s*(?:#[^\n]*\n\s*)*(?:\[|- )")


def split_script(text: str) -> list[str]:
    """Return the words of a shell script, of a unit of systemd, or of a list in JSON or YAML.

    Raises:
        ConfigError: a quote is not closed, or the text is YAML and PyYAML is not installed.
    """
    text = _INSTRUCTION.sub("", text, count=1) if _INSTRUCTION.match(text) else text
    if _LIST_LIKE.match(text):
        for found in read_documents(text):
            if isinstance(found, list):
                return list(map(text_of, found))
    return _split(_UNIT_VARIABLES.sub("\nexport ", _UNIT_COMMAND.sub("", text)))


def read_documents(text: str) -> list[Any]:
    """Return the documents of a JSON or YAML text; none if it is neither.

    Raises:
        ConfigError: PyYAML is not installed, or the aliases of a YAML text repeat too much.
    """
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        pass
    try:
        return list(load_yaml(text, repr(text[:80])))
    except ImportError as error:  # kvoffload does not require PyYAML; every vLLM brings it
        raise ConfigError([f"{text[:80]!r} is read as YAML, which needs: pip install pyyaml"]) from error
    except ConfigError:
        raise
    except Exception:  # PyYAML raises errors of many kinds, such as IndexError for `!!int ""`.
        return []


def load_yaml(text: str, source: str) -> Iterator[Any]:
    """Yield the documents of a YAML text. PyYAML must be installed; its errors are not converted.

    Raises:
        ConfigError: the aliases of the text repeat too much. `source` names the text in the error.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    while loader.check_node():
        node = loader.get_node()
        if _length(node, {}) > _LARGEST:
            raise ConfigError(
                [f"{source} is too long: with its aliases written out, it may have {_LARGEST:,} characters"]
            )
        yield loader.construct_document(node)


def _length(node: yaml.Node, known: dict[int, int]) -> int:
    """Return about how many characters a YAML node has if each of its aliases is written out.

    The result is too large for a node that has itself as a part. PyYAML writes out the aliases of merge keys, so a text of
    a few lines could need all memory.

    Args:
        node: a node as PyYAML composes it, with one object for all aliases of an anchor.
        known: the lengths of the nodes seen before, by identity.
    """
    if isinstance(node.value, str):
        return len(node.value) + 1
    if id(node) not in known:
        known[id(node)] = _LARGEST + 1  # until the length of all parts is known
        parts = [one for part in node.value for one in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = min(1 + sum(_length(part, known) for part in parts), _LARGEST + 1)
    return known[id(node)]


def text_of(value: object) -> str:
    """Return a value of a JSON or YAML text as a word. Anchors can make a short text a list of endless length."""
    return reprlib.repr(value) if isinstance(value, list | dict) else str(value)


def _split(text: str) -> list[str]:
    text = _COMMENT.sub(lambda found: found[1] or "", text)
    arrays = {
        name: items.replace("\n", " ") for name, items, closed in reversed(_ARRAY.findall(text)) if closed
    }
    text = _ALL_ITEMS.sub(lambda found: arrays.get(found[1], found[0]), text)
    text = _NUMBERED.sub("", _LINE_ENDS.sub(_joined, text)).strip()
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise ConfigError([f"{text[:80]!r} cannot be split into words: {error}"]) from error


def _joined(found: re.Match[str]) -> str:
    """Return what replaces a line's end. No command begins with "-", so a line that does continues the one before it."""
    if found[1] is None:
        return " "
    return found[0].replace("\n", " ") if found[2] else found[0]
