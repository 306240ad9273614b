"""Folders and files below `disk_path`, opened so that no other user can redirect them.

Where others may create files, a name can be a trap: a link, a pipe, a second name of another file, a file that another user made first
and can still write. So a name is looked up in the open folder, and the opened file is checked by its descriptor before it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from kvoffload.model.errors import DiskError

LOCK_TRIES, LOCK_PAUSE_S = 60, 1.0
"""How long an engine that is ending, or that hangs until it is killed, may keep its locks."""
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a name that may be a trap. Without O_NONBLOCK, opening a pipe would wait for its other end."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE = 0o022
_LOCKED: set[int] = set()


class OpenFolder:
    """An open folder. It stays the same one if its path leads elsewhere later. `open_folder` and `make` return it.

    Attributes:
        path: by which it was opened.
        descriptor: of the folder.
        lock: descriptor of the lock file in it that `close` unlocks; None if the folder is not locked.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.lock: int | None = None

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def make(self, name: str) -> OpenFolder:
        """Return a folder in this one; make it, with the mode 0700, if it is missing.

        Raises:
            DiskError: it is not this user's own, or others may write to it.
            OSError: it cannot be made or opened.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return OpenFolder(self.path / name, _checked(self.path / name, _FOLDER, 0o700, self.descriptor, name))

    def open(self, name: str, flags: int) -> int:
        """Return the descriptor of a file in this folder; with `O_CREAT` it is made, with the mode 0600, if it is missing.

        Raises:
            DiskError: it is not a plain file of this user with one name, or others may write to it.
            OSError: it is missing or cannot be opened.
        """
        return _checked(self.path / name, flags, 0o600, self.descriptor, name)

    def make_file(self, name: str) -> int:
        """Create a file, in place of any file of that name, and return its descriptor."""
        self.unlink(name)
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=self.descriptor)

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, durably; a file that had that name is lost."""
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        self.sync()

    def unlink(self, name: str) -> None:
        """Remove a name, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        os.fsync(self.descriptor)

    def is_at_its_path(self) -> bool:
        """Whether the path still leads to this folder."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.descriptor))

    def close(self) -> None:
        """Close and unlock it; files that were opened in it stay open."""
        if self.lock is not None:
            close_locked(self.lock)
        os.close(self.descriptor)


def open_folder(path: Path) -> OpenFolder:
    """Open a folder of this user.

    Raises:
        DiskError: it is not this user's own, or others may write to it.
        OSError: it is missing or cannot be opened.
    """
    return OpenFolder(path, _checked(path, _FOLDER, 0o700, None, str(path)))


def open_root(path: Path) -> OpenFolder:
    """Open a folder that may be another user's, as a volume is; make it if it is missing."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return OpenFolder(path, os.open(path, _FOLDER))


def lock(descriptor: int) -> None:
    """Lock an open file for this process; `close_locked` unlocks it.

    Raises:
        BlockingIOError: it is locked.
    """
    _LOCKED.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        _LOCKED.discard(descriptor)
        raise


def close_locked(descriptor: int) -> None:
    """Close and unlock a file."""
    _LOCKED.discard(descriptor)
    os.close(descriptor)


def _leave_locks() -> None:
    """In a forked child, leave the locks to the parent: a child that outlives it would keep them.

    Locks of `fcntl` are not inherited, but the first close of any descriptor of the file would release them. The descriptors' numbers stay
    in use, so that the child does not close other files by them.
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
