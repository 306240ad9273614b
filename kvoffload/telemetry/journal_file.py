"""The journal's file: readable by its owner only, written by one process, and never a reason to wait."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kvoffload.model.errors import ConfigError


class JournalFile:
    """A file that lines are appended to.

    Args:
        path: where; its folder must exist. An existing file is continued.

    Raises:
        ConfigError: it cannot be opened for writing, is no regular file, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not blocking, because opening a pipe that nobody reads would wait for ever.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(path, flags, 0o600)
        except (OSError, ValueError) as exc:
            raise _unusable(path, getattr(exc, "strerror", None) or str(exc)) from exc
        try:
            _claim(path, self._descriptor)
        except ConfigError:
            self.close()
            raise

    def append(self, text: str) -> None:
        """Write all of `text`.

        Raises:
            OSError: it cannot be written; part of it may have been.
        """
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Close it. Closing twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _claim(path: Path, descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise _unusable(path, "not a regular file")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, 0o600)
    except BlockingIOError as exc:
        raise _unusable(path, "another process writes it; give each its own") from exc
    except OSError as exc:
        raise _unusable(path, exc.strerror or str(exc)) from exc


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError([f"journal_path {path} cannot be written: {reason}"])
