"""The text of the conversations: the given files or this project's documents, then the sources of Python's library."""

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
    """Bytes, each of which is a token.

    Args:
        tokens: the requested number of them.
        documents: names of their files, without Python's library.
        library_tokens: tokens from Python's library.
    """

    tokens: bytes
    documents: tuple[str, ...]
    library_tokens: int


def read_text(documents: Sequence[Path], tokens: int) -> Text:
    """Return this many tokens of `documents`, or of this project's if there are none, then of Python's library.

    Raises:
        CommandError: a document cannot be read or is empty, or there is not enough text.
    """
    read: list[tuple[str, bytes]] = []
    missing = tokens
    for path in documents or project_documents():
        # Also documents that are not needed are read, so that a wrong name is always an error.
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
    """Return this project's documents, beside the package or in the working directory."""
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
