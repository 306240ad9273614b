"""Everything that the checks read: the kernel's files, the devices, and the packages of this environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.checks.gpus import Gpus, find_gpus

if TYPE_CHECKING:
    from kvoffload.transfer.ports import ReadText

_LARGEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Space:
    """The bytes of a file system."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that an engine will start on. Nothing is read before a check asks for it.

    Args:
        read: returns the text of a file by its absolute path, None if it cannot be read.
        exists: whether there is a file or device of this absolute path.
        space: of the file system at an absolute path, None if unknown.
        gpus: the visible GPUs and their driver.
        requirements: the requirements in kvoffload's metadata.
        version: of a package in this environment, None if it is not installed.
        entry_points: values of a group by name.
        source: text of an installed package's file, without importing the package; None if it cannot be read.
        environ: the process's environment.
        python: the interpreter's version.
    """

    read: ReadText = field(default_factory=lambda: reader(Path("/")))
    exists: Callable[[str], bool] = os.path.exists
    space: Callable[[str], Space | None] = field(default=lambda path: _space(path))
    gpus: Callable[[], Gpus] = find_gpus
    requirements: Callable[[], tuple[str, ...]] = field(default=lambda: _requirements())
    version: Callable[[str], str | None] = field(default=lambda name: _version(name))
    entry_points: Callable[[str], Mapping[str, str]] = field(default=lambda group: _entry_points(group))
    source: Callable[[str, str], str | None] = field(default=lambda package, path: _source(package, path))
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: tuple[int, ...] = sys.version_info[:3]


def reader(root: Path) -> ReadText:
    """Return a function that reads absolute paths below `root`, which is "/" except in tests."""

    def read(path: str) -> str | None:
        try:
            with (root / path.lstrip("/")).open(encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_FILE)
        except OSError:
            return None

    return read


def _space(path: str) -> Space | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _requirements() -> tuple[str, ...]:
    return tuple(metadata.requires("kvoffload") or ())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _entry_points(group: str) -> Mapping[str, str]:
    return {point.name: point.value for point in metadata.entry_points(group=group)}


def _source(package: str, path: str) -> str | None:
    from importlib.util import find_spec  # finding a top-level package does not import it

    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return reader(Path(folders[0]))(path) if folders else None
