"""Everything that the checks read: the kernel's files, the GPUs, and the packages of this environment."""

from __future__ import annotations

import os
import resource
import shutil
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
class Machine:
    """The machine that an engine will start on. Nothing is read before a check asks for it.

    Args:
        read: returns the text of a file by its absolute path, None if it cannot be read.
        lockable: the bytes of memory that this process may lock; negative without a limit.
        free: bytes that the file system of a folder has free.
        gpus: the visible GPUs and their driver.
        version: of a package in this environment, None if it is not installed.
        entry_points: values of a group by name.
        environ: the process's environment.
    """

    read: ReadText = field(default_factory=lambda: reader(Path("/")))
    lockable: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    gpus: Callable[[], Gpus] = find_gpus
    version: Callable[[str], str | None] = field(default=lambda name: _version(name))
    entry_points: Callable[[str], Mapping[str, str]] = field(default=lambda group: _entry_points(group))
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def reader(root: Path) -> ReadText:
    """Return a function that reads absolute paths below `root`, which is "/" except in tests."""

    def read(path: str) -> str | None:
        try:
            with (root / path.lstrip("/")).open(encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_FILE)
        except OSError:
            return None

    return read


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _entry_points(group: str) -> Mapping[str, str]:
    return {point.name: point.value for point in metadata.entry_points(group=group)}
