"""The journal's file: only its owner can read it, and one process writes it.

In a folder where others may create files, a name can be a trap: a link that leads what is written into another file. So
neither a symbolic link, nor a file with a second name, nor another user's file is written. An existing file of ours is
continued, and others lose the right to read it.

A bounded journal has two files, each up to half of the bound: when the file is full, it replaces the one named `.1`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from math import inf
from pathlib import Path

from kvoffload.model.errors import ConfigError

_OWNERS = 0o600


def rotated(path: Path) -> Path:
    """Return the name of the file before this one."""
    return path.with_name(f"{path.name}.1")


class JournalFile:
    """A file to which lines are appended.

    Args:
        path: its name; the folder must exist. An existing file is continued.
        max_bytes: of this file and the one before it together; None for no bound.

    Raises:
        ConfigError: it cannot be opened for writing, is not a regular file, is a link or another user's, or another process
            writes it.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path = path
        self._descriptor = _open(path)
        self._size = os.fstat(self._descriptor).st_size
        self._most = max_bytes // 2 if max_bytes is not None else None
        self._has_head = False

    @property
    def most_at_once(self) -> float:
        """Bytes that one call of `append` may write, so that they and a head fit into one file."""
        return inf if self._most is None else self._most / 2

    def append(self, text: str, head: str = "") -> None:
        """Write all of `text`, in a new file if it does not fit; `head` comes first wherever this process begins a file.

        Raises:
            OSError: it cannot be written; part of it may have been.
            ConfigError: the file was full, and there can be no new one.
        """
        if self._most is not None and self._size and self._size + len(text) > self._most:
            self._rotate()
        if not self._has_head:
            text = f"{head}{text}"
            self._has_head = True
        data = text.encode()
        rest = memoryview(data)
        while rest:
            if (count := os.write(self._descriptor, rest)) <= 0:
                raise OSError(errno.EIO, "a write to the journal wrote nothing")
            rest = rest[count:]
        self._size += len(data)

    def close(self) -> None:
        """Close it. Closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _rotate(self) -> None:
        """Keep this file as the one before, and begin a new one. The lock of the old one is held until then."""
        os.replace(self.path, rotated(self.path))
        descriptor = _open(self.path)
        self.close()
        self._descriptor = descriptor
        self._size = 0
        self._has_head = False


def _open(path: Path) -> int:
    try:
        # Not blocking, because opening a pipe that nothing reads would wait for ever.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(path, flags, _OWNERS)
    except (OSError, ValueError) as error:
        is_link = getattr(error, "errno", None) == errno.ELOOP and os.path.islink(path)
        reason = "a symbolic link; name the file itself" if is_link else getattr(error, "strerror", None)
        raise _unusable(path, reason or str(error)) from error
    try:
        _claim(path, descriptor)
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def _claim(path: Path, descriptor: int) -> None:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise _unusable(path, "not a regular file")
    if about.st_uid != os.geteuid():
        raise _unusable(path, "another user's file")
    if about.st_nlink > 1:
        raise _unusable(path, "a file with a second name (a hard link)")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, _OWNERS)  # whatever the umask is, and whatever it was before
    except BlockingIOError as error:
        raise _unusable(path, "another process writes it; give each its own") from error
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError([f"journal_path {path} cannot be written: {reason}"])
