"""The disk tier's folders: a folder for each fingerprint, which contains a folder for each replica.

disk_path/                       weights.json: digests of weight files
    <fingerprint>/               identity.json: the parts of the fingerprint, for people to read
        replica0/                lock, index, slots0, slots1, ...
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.open_folder import OpenFolder, close_locked, lock, open_root
from kvoffload.model.errors import DiskError

_LOCK = "lock"
_LONGEST_HOLDER = 200  # the maximum number of characters that an error quotes from the lock file


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Determines the folder of an engine's files.

    Args:
        root: the setting `disk_path`.
        identify: returns the identity of the engine's KV. It may read all weights, so it is called on a thread of the
            disk tier.
        replica: the index of this engine among the data-parallel engines.
    """

    root: Path
    identify: Callable[[], KVIdentity]
    replica: int = 0

    def make_folder(self) -> OpenFolder:
        """Open the folder of the engine's files, and create the folder if it is missing.

        Raises:
            DiskError: the folder cannot be created, or the weights cannot be read.
        """
        return make_folder(self.root, self.identify(), self.replica)


class FolderInUse(DiskError):
    """Raised when another process has locked the folder."""


def make_folder(root: Path, identity: KVIdentity, replica: int) -> OpenFolder:
    """Open the folder of one engine's files. If the folder is missing, create it for this user only.

    Raises:
        DiskError: the folder cannot be created, or a folder below `root` does not belong to this user.
    """
    path = root / identity.fingerprint / f"replica{replica}"
    try:
        with open_root(root) as opened, opened.make(identity.fingerprint) as parent:
            _describe(parent, identity)
            return parent.make(path.name)
    except OSError as error:
        raise DiskError(f"disk_path: the folder {path} cannot be made or used: {error.strerror}") from error


def caution(root: Path) -> str:
    """Return a warning if other users could replace `disk_path` or this user's folders in it; otherwise ""."""
    path = root.absolute()
    for each in (path, *path.parents):
        try:
            mode = each.stat().st_mode
        except OSError:
            continue
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return (
                f"every user may rename and remove what is in {each} ({stat.filemode(mode)}): chmod o-w, or +t, "
                "or name another disk_path"
            )
    return ""


def lock_folder(folder: OpenFolder) -> OpenFolder:
    """Lock a folder for this process, and return the folder. It stays locked until it is closed.

    If the folder cannot be locked, it is closed.

    Raises:
        FolderInUse: another process has locked the folder; the message names that process.
        DiskError: the lock file does not belong to this user, or the disk fails.
    """
    try:
        folder.lock = _locked(folder)
    except BaseException as error:
        folder.close()
        if isinstance(error, OSError):
            raise DiskError(f"disk_path: {folder.path} cannot be locked: {error.strerror}") from error
        raise
    return folder


def _locked(folder: OpenFolder) -> int:
    descriptor = folder.open(_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        lock(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError as error:
        who = os.pread(descriptor, _LONGEST_HOLDER, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise FolderInUse(
            f"disk_path: {folder.path} is in use by {who or 'another process'}; give each engine a disk_path of its own"
        ) from error
    except BaseException:
        close_locked(descriptor)
        raise
    return descriptor


def _describe(folder: OpenFolder, identity: KVIdentity) -> None:
    """Write the parts of the fingerprint to `identity.json`, for people to read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open("identity.json", flags, 0o600, dir_fd=folder.descriptor)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        json.dump(identity.as_parts(), file, indent=2, sort_keys=True)
        file.write("\n")
