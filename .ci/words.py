"""Finds words and forms that make prose hard to read, in comments, docstrings, messages and documents.

Usage: python .ci/words.py [PATH ...]   (default: every tracked file of Python, Markdown and YAML)

Each finding is printed as "file:line: form: text". The exit code is 1 if there are findings. Lines that must contain
such a word, such as a quotation or a term of another project, are listed in `EXCEPTIONS`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = (".py", ".md", ".yaml", ".yml")

# for each form, what to write instead
FORMS = {
    r"whoever|whomever|nobody": "name who acts",
    r"whatever is|whatever it is|what lies|what lay|what comes after": "put the noun first",
    r"for ever": "forever, or 'until ...'",
    r"excepted|save that|save for|those aside|that aside|aside that": "except, ignoring",
    r"mend(?:s|ed|ing)?": "fix",
    r"doomed": "say what will happen",
    r"twins?": "duplicate, copy",
    r"lets? go of|let go|letting go": "release",
    r"giv(?:e|es|ing|en) up|gave up": "stop, abandon, time out",
    r"(?:is|are|was|were|been|be) told|tells? it|heard|news": "reported, received, new",
    r"hand(?:s|ed|ing)? out": "allocate",
    r"junctions?": "shared-prefix boundary",
    r"(?:reads?|reading) ahead|read-ahead": "lookahead",
    r"struck|strikes?": "invalidate",
    r"patience": "timeout",
    r"worthless": "unreachable, unused",
    r"withdrawn|written off|writes? off|writing off": "cancelled, leaked",
    r"remote stores?": "remote tier",
    r"laws?": "invariant",
    r"wherein|whereof|whereby|thereby|therein|thereof|hitherto|lest|henceforth": "plain words",
    r"for want of|for lack of": "without, because ... is missing",
    r"is not worth|are not worth|not worth (?:it|the)": "give the consequence",
    r"of before": "earlier",
    r"an? \w+ of (?:its|theirs|ours|mine)(?=[ .,;:)]+(?:failed|was|is|has|that|which|$))": "one of its ...",
    r"(?:is|are) to (?:be|have|forget|end|stop|go|hold|keep|say|come|stay|do)\b": "must, will, or the imperative",
    r"as it were|so to speak|in truth|of old|ere": "plain words",
    r"bear(?:s|ing)? (?:it|them|that)": "plain words",
    r"all in all|come what may|one behind (?:the other|another)|so manieth|wholly": "plain words",
    r"everybody|anyone's|no one's|who waits|who asks": "name who acts",
    r"says? so too|and says so|says so in": "reports it",
    r"bespoke|leverag(?:e|es|ing)|utiliz(?:e|es|ing)|seamless(?:ly)?|robust(?:ly|ness)?": "plain words",
}
PATTERN = re.compile("|".join(rf"\b(?P<f{i}>{form})\b" for i, form in enumerate(FORMS)), re.IGNORECASE)
INSTEAD = list(FORMS.values())

# The lines that are allowed: for each, the end of the file's path and a part of the line.
EXCEPTIONS = (("tests/cli/test_journal_lines.py", "request nobody"),)


def findings(path: Path) -> Iterator[tuple[int, str, str, str]]:
    """Yield for each finding in a file: the line's number, the form, what to write instead, and the text."""
    for line, text in _prose(path):
        for found in PATTERN.finditer(text):
            if not any(str(path).endswith(end) and part in text for end, part in EXCEPTIONS):
                number = int(found.lastgroup[1:]) if found.lastgroup else 0
                yield line, found.group(), INSTEAD[number], text.strip()


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _comments(source)
        yield from _strings(source)
    elif path.suffix == ".md":
        yield from _markdown(source)
    else:
        yield from enumerate(source.splitlines(), 1)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings and messages, which are the string constants with more than one word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            for offset, text in enumerate(node.value.splitlines()):
                yield node.lineno + offset, text


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown file that are not code."""
    is_code = False
    for number, text in enumerate(source.splitlines(), 1):
        if text.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not text.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "``", text)


def _tracked(paths: Sequence[Path]) -> list[Path]:
    """Return the files below these paths that git tracks. Without paths, return all tracked files."""
    command = ["git", "ls-files", "-z", "--", *map(str, paths)]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [
        ROOT / name
        for name in names
        if Path(name).suffix in KINDS and not name.startswith("tests/same/") and ROOT / name != Path(__file__)
    ]


def main(paths: list[Path]) -> int:
    """Print all findings. Return 1 if there are any."""
    found = False
    for path in _tracked(paths):
        for line, form, instead, text in findings(path):
            found = True
            print(f"{path}:{line}: {form!r} ({instead}): {text}")
    return int(found)


if __name__ == "__main__":
    sys.exit(main([Path(one).resolve() for one in sys.argv[1:]]))
