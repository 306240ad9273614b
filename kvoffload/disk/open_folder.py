"""Opens folders and files below `disk_path` in a way that other users cannot redirect.

Where other users may create files, a name can be a trap: a symbolic link, a pipe, a hard link to another file, or a
file that another user created first and can still write to. So names are looked up relative to an open folder, and
each file is checked through its descriptor after it was opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from kvoffload.model.errors import DiskError

LOCK_TRIES, LOCK_PAUSE_S, LOCK_NOTE = 60, 1.0, "retrying for a minute"
"""How many times to try a lock again, the seconds between two tries, and the note of `disk_in_use` that says so.

The previous engine may still hold the lock while it shuts down, or while it hangs until it is killed.
"""
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a name that may be a trap. Without O_NONBLOCK, opening a pipe would wait for a writer."""
FINGERPRINT_BYTES = 32
"""The length of a KV's fingerprint."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE = 0o022
_LOCKED: set[int] = set()


class DiskInUse(DiskError):
    """Raised when another process has locked a folder or a slot file."""


class OpenFolder:
    """An open folder. Its descriptor refers to the same folder even if the path is later replaced.

    Create it with `open_folder`, `open_root` or `make`.

    Attributes:
        path: the folder's path when it was opened.
        descriptor: the folder's file descriptor.
        fingerprint: the fingerprint of the KV in the folder's files; empty for a folder without such files.
        lock: the descriptor of the folder's lock file, which `close` unlocks; None if the folder is not locked.
    """

    def __init__(self, path: Path, descriptor: int, fingerprint: str = "") -> None:
        self.path = path
        self.descriptor = descriptor
        self.fingerprint = fingerprint
        self.lock: int | None = None

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def make(self, name: str) -> OpenFolder:
        """Open a folder inside this folder. If the inner folder is missing, create it with mode 0700.

        Raises:
            DiskError: the folder belongs to another user, or others may write to it.
            OSError: the folder cannot be created or opened.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return OpenFolder(self.path / name, _checked(self.path / name, _FOLDER, 0o700, self.descriptor, name))

    def open(self, name: str, flags: int) -> int:
        """Open a file in this folder, and return its descriptor. With `O_CREAT`, create a missing file with mode 0600.

        Raises:
            DiskError: the file is not a plain file of this user, has other hard links, or others may write to it.
            OSError: the file is missing or cannot be opened.
        """
        return _checked(self.path / name, flags, 0o600, self.descriptor, name)

    def make_file(self, name: str) -> int:
        """Create a file, replacing any existing file with this name, and return the new file's descriptor."""
        self.unlink(name)
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=self.descriptor)

    def rename(self, name: str, to: str) -> None:
        """Rename a file, replacing any existing file with the new name, and sync the folder."""
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        self.sync()

    def unlink(self, name: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Sync the folder, so that its list of names is on the disk."""
        os.fsync(self.descriptor)

    def is_at_its_path(self) -> bool:
        """Return whether `path` still leads to this folder."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.descriptor))

    def close(self) -> None:
        """Unlock and close the folder. Files that were opened in this folder stay open."""
        if self.lock is not None:
            close_locked(self.lock)
        os.close(self.descriptor)


def open_folder(path: Path, fingerprint: str = "") -> OpenFolder:
    """Open a folder of this user, with files of the KV with this fingerprint.

    Raises:
        DiskError: the folder belongs to another user, or others may write to it.
        OSError: the folder is missing or cannot be opened.
    """
    return OpenFolder(path, _checked(path, _FOLDER, 0o700, None, str(path)), fingerprint)


def open_file(path: Path, flags: int) -> int:
    """Open a file in a folder that may belong to another user, and return its descriptor. See `OpenFolder.open`.

    Raises:
        DiskError: the file is not a plain file of this user, has other hard links, or others may write to it.
        OSError: the file is missing or cannot be opened.
    """
    return _checked(path, flags, 0o600, None, str(path))


def open_root(path: Path) -> OpenFolder:
    """Open a folder that may belong to another user, such as a mounted volume. Create the folder if it is missing."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return OpenFolder(path, os.open(path, _FOLDER))


def lock(descriptor: int, how: int = fcntl.LOCK_EX) -> None:
    """Lock an open file for this process. `close_locked` unlocks the file.

    Args:
        descriptor: the file.
        how: LOCK_EX, or LOCK_SH for a lock that several processes may have at once.

    Raises:
        BlockingIOError: another process has locked the file.
    """
    _LOCKED.add(descriptor)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BaseException:
        _LOCKED.discard(descriptor)
        raise


def close_locked(descriptor: int) -> None:
    """Unlock and close a file."""
    _LOCKED.discard(descriptor)
    os.close(descriptor)


def _leave_locks() -> None:
    """In a forked child, close all locked files, because a child that outlives its parent would keep the locks.

    Each closed descriptor then refers to /dev/null. So its number stays in use, and if the child closes this number
    later, it does not close another file. Children would not inherit locks by `fcntl`, but these are not used,
    because a process loses them when it closes any descriptor of the file.
    """
    if not _LOCKED:
        return
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for descriptor in _LOCKED:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_leave_locks)


def _checked(path: Path, flags: int, mode: int, within: int | None, name: str) -> int:
    is_folder = bool(flags & os.O_DIRECTORY)
    try:
        descriptor = os.open(name, flags | SAFE, mode, dir_fd=within)
    except FileNotFoundError:
        raise
    except OSError:
        _check(path, os.stat(name, dir_fd=within, follow_symlinks=False), is_folder=is_folder)
        raise
    try:
        found = os.fstat(descriptor)
        _check(path, found, is_folder=is_folder)
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, found: os.stat_result, *, is_folder: bool) -> None:
    is_kind = stat.S_ISDIR(found.st_mode) if is_folder else stat.S_ISREG(found.st_mode)
    has_one_name = is_folder or found.st_nlink == 1
    is_ours = found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE
    if is_kind and has_one_name and is_ours:
        return
    kind = "a folder" if is_folder else "a plain file with one name"
    raise DiskError(
        f"{path} is not used: its owner is {found.st_uid}, its mode {stat.filemode(found.st_mode)}, its names {found.st_nlink}; "
        f"it must be {kind} of user {os.geteuid()} that group and others cannot write"
    )
