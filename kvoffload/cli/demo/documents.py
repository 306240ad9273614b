"""Where the text comes from: files that were named, else this project's documents; then the sources of Python's library."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kvoffload
from kvoffload.cli.exits import CommandError

_NAMES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes, which are also the tokens.

    Args:
        tokens: as many as were asked for.
        documents: names of the files that they come from, Python's library aside.
        library_tokens: how many come from Python's library.
    """

    tokens: bytes
    documents: tuple[str, ...]
    library_tokens: int


def read_text(documents: Sequence[Path], tokens: int) -> Text:
    """Return so many tokens, from `documents` (none: those of this project) as far as they reach.

    Raises:
        CommandError: a document cannot be read or is empty, or there is not enough text.
    """
    read: list[tuple[str, bytes]] = []
    missing = tokens
    for path in documents or project_documents():
        # One that is not reached is read all the same: a wrong name is an error wherever it stands.
        text = _read(path, max(missing, 1))[:missing]
        read.append((path.name, text))
        missing -= len(text)
    library = _library_text(missing)
    if len(library) < missing:
        have = tokens - missing + len(library)
        raise CommandError(
            f"the conversations need {tokens} bytes of text, and there are {have}: add --document"
        )
    used = tuple(name for name, text in read if text)
    return Text(b"".join([*(text for _, text in read), library]), used, len(library))


def project_documents() -> list[Path]:
    """This project's documents, beside the package or in the working directory."""
    package = Path(kvoffload.__file__).parent
    found: dict[Path, Path] = {}
    for folder in (package.parent, package, Path.cwd()):
        for path in (folder / name for name in _NAMES):
            if path.is_file() and path.stat().st_size:
                found.setdefault(path.resolve(), path)
    return list(found.values())


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(limit)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CommandError(f"document {path} cannot be read: {reason}") from error
    if not text:
        raise CommandError(f"document {path} is empty")
    return text


def _library_text(tokens: int) -> bytes:
    text = b""
    sources = iter(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    while len(text) < tokens and (source := next(sources, None)):
        text += source.read_bytes()
    return text[:tokens]
