"""The journal's file: readable by its owner only, written by one process, and never a reason to wait.

Where others may create files too, a name can be a trap: a link that leads what is written into another file. So neither
a symbolic link nor a file with a second name is written, nor one of another user. A file of ours that others may read
is continued, and from then on they may not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from kvoffload.model.errors import ConfigError

_OWNERS = 0o600


class JournalFile:
    """A file that lines are appended to.

    Args:
        path: where; its folder must exist. An existing file is continued, and taken from other users' eyes.

    Raises:
        ConfigError: it cannot be opened for writing, is no regular file, a link, another user's, or another process
            writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not blocking, because opening a pipe that nobody reads would wait for ever.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, _OWNERS)
        except (OSError, ValueError) as exc:
            is_link = getattr(exc, "errno", None) == errno.ELOOP and os.path.islink(path)
            reason = "a symbolic link; name the file itself" if is_link else getattr(exc, "strerror", None)
            raise _unusable(path, reason or str(exc)) from exc
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
    except BlockingIOError as exc:
        raise _unusable(path, "another process writes it; give each its own") from exc
    except OSError as exc:
        raise _unusable(path, exc.strerror or str(exc)) from exc


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError([f"journal_path {path} cannot be written: {reason}"])
